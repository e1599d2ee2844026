"""From a spec to a policy, and what is said of a wrong spec."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.policies import make_policy, registry
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.hogwild import Hogwild
from zmqtrain.policies.sync_replicas import SyncReplicas, TokenSyncReplicas

PLUG_IN = """
from zmqtrain.policies.bounded_staleness import BoundedStaleness

class Patient(BoundedStaleness):
    def __init__(self, options):
        super().__init__(len(options))
        self.options = options

def broken(options):
    raise KeyError(options)

def nothing(options):
    return options

class Plain(BoundedStaleness):
    def __init__(self):
        super().__init__(2)

def plain():
    return Plain()
"""


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("hogwild", Hogwild),
        (" hogwild ", Hogwild),
        ("bounded-staleness:3", BoundedStaleness),
        ("sync-replicas", SyncReplicas),
        ("sync-replicas:", SyncReplicas),
        ("sync-replicas:aggregate=2", SyncReplicas),
        ("sync-replicas:aggregate=2,tokens=0", TokenSyncReplicas),
        ("sync-replicas:tokens=3,aggregate=2", TokenSyncReplicas),
    ],
)
def test_spec_makes_a_policy_of_its_kind(spec: str, kind: type) -> None:
    assert type(make_policy(spec)) is kind


def test_every_call_makes_a_new_policy() -> None:
    assert make_policy("sync-replicas") is not make_policy("sync-replicas")


FORMS = (
    "expected hogwild, hogwild:whole, bounded-staleness:S, sync-replicas, "
    "sync-replicas:aggregate=R, sync-replicas:aggregate=R,tokens=N, the name of "
    'an installed plug-in, or "module:attr"'
)
NO_MODULE = "no module 'no.such' beside the job's file"
WHOLE = (
    "expected hogwild, or hogwild:whole for steps that count on every ps or on none, even if "
    "their worker dies"
)
MANY = "9" * 5000
AT_MOST = "expected a whole number from 0 to 1000000"
TWICE = "has aggregate twice; expected it once; leave out one"
OPTIONS = (
    "expected aggregate=R (gradients averaged in a step) or, for TensorFlow's token queue, "
    "tokens=N as well"
)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", f"unknown policy '': {FORMS}"),
        ("nope", f"unknown policy 'nope': {FORMS}"),
        ("bounded_staleness:2", "did you mean bounded-staleness?"),
        ("no.such:policy", NO_MODULE),
        ("json.decoder", f"unknown policy 'json.decoder': {FORMS}"),
        (":attr", f"unknown policy ':attr': {FORMS}"),
        (".json:loads", f"unknown policy '.json:loads': {FORMS}"),
        ("a/b.py:attr", f"unknown policy 'a/b.py:attr': {FORMS}"),
        (
            "hogwild:3",
            f"unknown option '3' of hogwild: {WHOLE}",
        ),
        (
            "bounded-staleness",
            "policy bounded-staleness:S: got '', expected a whole number from 0 to 1000000",
        ),
        (
            "bounded-staleness:-1",
            "policy bounded-staleness:S: got '-1', expected a whole number from 0 to 1000000",
        ),
        (
            "bounded-staleness:1.5",
            "policy bounded-staleness:S: got '1.5', expected a whole number from 0 to 1000000",
        ),
        (
            "bounded-staleness:٣",
            "policy bounded-staleness:S: got '٣', expected a whole number from 0 to 1000000",
        ),
        (
            "sync-replicas:aggregate=0",
            "policy sync-replicas:aggregate=R: got '0', expected a whole number from 1 to 1000000",
        ),
        (
            "sync-replicas:aggregate",
            "policy sync-replicas:aggregate=R: got '', expected a whole number from 1 to 1000000",
        ),
        (
            "sync-replicas:aggregate=2,tokens=x",
            "policy sync-replicas:tokens=N: got 'x', expected a whole number from 0 to 1000000",
        ),
        (
            "sync-replicas:aggregate=1,tokens=1000001",
            f"policy sync-replicas:tokens=N: got '1000001', {AT_MOST}",
        ),
        (
            f"bounded-staleness:{MANY}",
            f"policy bounded-staleness:S: got '{MANY[:79]}, {AT_MOST}",
        ),
        ("sync-replicas:aggregate=2,aggregate=3", f"sync-replicas:aggregate=2,aggregate=3 {TWICE}"),
        ("sync-replicas:tokens=2", "sync-replicas:tokens=N needs aggregate=R as well"),
        ("sync-replicas:2", f"unknown option '2' of sync-replicas: {OPTIONS}"),
        ("sync-replicas:total=2", f"unknown option 'total=2' of sync-replicas: {OPTIONS}"),
        ("json:nope", "policy 'json:nope': module json has no 'nope'"),
        ("math:pi", "policy 'math:pi' cannot be made: TypeError: 'float' object is not callable"),
    ],
)
def test_wrong_spec_is_a_config_error(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy(spec)
    assert sentence in str(raised.value)


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module of policies."""
    (tmp_path / "patience_plug_in.py").write_text(PLUG_IN)
    (tmp_path / "patience_unmet.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "patience_faulty.py").write_text("import json\njson.nope\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "patience_plug_in", raising=False)
    return "patience_plug_in"


@pytest.mark.parametrize(("rest", "options"), [("", ""), (":abc", "abc"), (":a=1:b=2", "a=1:b=2")])
def test_module_and_attribute_make_a_policy(plug_in: str, rest: str, options: str) -> None:
    policy = make_policy(f"{plug_in}:Patient{rest}")
    assert type(policy).__name__ == "Patient"
    assert policy.options == options


@pytest.mark.parametrize("name", ["Plain", "plain"])
def test_class_without_a_parameter_is_called_without_options(plug_in: str, name: str) -> None:
    assert type(make_policy(f"{plug_in}:{name}")).__name__ == "Plain"


@pytest.mark.parametrize(
    ("attribute", "problem"),
    [
        ("Missing", ": module patience_plug_in has no 'Missing'"),
        ("broken:x", " cannot be made: KeyError: 'x'"),
        ("nothing", " made a str, which lacks spec, coordinated"),
        ("Patiant", "; did you mean Patient?"),
    ],
)
def test_wrong_attribute_is_a_config_error(plug_in: str, attribute: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy(f"{plug_in}:{attribute}")
    assert f"policy '{plug_in}:{attribute}'" in str(raised.value)
    assert problem in str(raised.value)


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("patience_unmet", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("patience_faulty", "AttributeError: module 'json' has no attribute 'nope'"),
    ],
)
def test_plug_in_that_does_not_import_is_not_called_unknown(module: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy(f"{module}:Policy")
    assert str(raised.value) == f"policy '{module}:Policy' cannot be made: {reason}"


def test_installed_plug_in_is_found_by_name(plug_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = EntryPoints(
        [
            EntryPoint("patient", "json:loads", "somebody.elses.group"),
            EntryPoint("patient", f"{plug_in}:Patient", "zmqtrain.policies"),
            EntryPoint("hogwild", f"{plug_in}:Patient", "zmqtrain.policies"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", installed.select)
    assert make_policy("patient:ab").staleness_bound == 2
    assert type(make_policy("hogwild")) is Hogwild


def test_installed_plug_in_that_does_not_load_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = EntryPoints([EntryPoint("lost", "json:nope", "zmqtrain.policies")])
    monkeypatch.setattr(registry, "entry_points", installed.select)
    with pytest.raises(ConfigError) as raised:
        make_policy("lost")
    assert str(raised.value) == (
        "policy 'lost' cannot be made: AttributeError: module 'json' has no attribute 'nope'"
    )
