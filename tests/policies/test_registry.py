"""From a spec to a policy, and what is said of a wrong spec."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.policies import load_policy, make_policy, try_policy
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.hogwild import Hogwild
from zmqtrain.policies.local_steps import AsyncLocalSteps, LocalSteps
from zmqtrain.policies.sync_replicas import SyncReplicas, TokenSyncReplicas

PLUG_IN = """
from zmqtrain.policies.bounded_staleness import BoundedStaleness

class Patient(BoundedStaleness):
    def __init__(self, options):
        super().__init__(len(options))
        self.options = options

class Broken(Patient):
    def __init__(self, options):
        raise KeyError(options)

class Leaving(Patient):
    def __init__(self, options):
        raise SystemExit(options)

class Counted(Patient):
    def __init__(self, options):
        super().__init__("x" * int(options))

class Unsaid(Patient):
    spec = "not-a-policy"

class Late(Patient):
    spec = __name__ + ":Late"

    def start(self, version, workers):
        raise ValueError("late")

class Halved:
    def __init__(self):
        raise AssertionError("made")

    def start(self, version, workers):
        pass

class Long(Patient):
    most_local_steps = 1001

class Odd(Patient):
    most_local_steps = None

class Half(Patient):
    def local_steps(self, step):
        return 3

class Plain(BoundedStaleness):
    def __init__(self):
        super().__init__(2)

def plain():
    raise AssertionError("called")
"""


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("hogwild", Hogwild),
        (" hogwild ", Hogwild),
        ("bounded-staleness:3", BoundedStaleness),
        ("sync-replicas", SyncReplicas),
        ("sync-replicas:aggregate=2", SyncReplicas),
        ("sync-replicas:aggregate=2,tokens=0", TokenSyncReplicas),
        ("sync-replicas:tokens=3,aggregate=2", TokenSyncReplicas),
        ("local-steps:5", LocalSteps),
        ("local-steps:5,after=9", LocalSteps),
        ("local-steps:5,after=9,async", AsyncLocalSteps),
        ("local-steps:5,bound=2,async,after=9", AsyncLocalSteps),
    ],
)
def test_spec_makes_a_policy_of_its_kind(spec: str, kind: type) -> None:
    assert type(make_policy(spec)) is kind


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("", "expected hogwild, "),
        ("nope", "'nope'"),
        ("bounded_staleness:2", "did you mean bounded-staleness?"),
        ("sync", "did you mean sync-replicas?"),
        ("no.such:policy", "'no.such'"),
        ("json.decoder", "'json.decoder'"),
        (":attr", "':attr'"),
        (".json:loads", "'.json:loads'"),
        ("a/b.py:attr", "'a/b.py:attr'"),
        ("hogwild:3", "'3'"),
        ("hogwild:", "unknown option '' of hogwild"),
        ("hogwild:whole:", "'whole:'"),
        ("hogwild:whole,", "'whole,'"),
        ("sync-replicas:", "unknown option '' of sync-replicas"),
        ("sync-replicas:aggregate=2,", "unknown option ''"),
        ("sync-replicas:aggregate=2,,tokens=3", "unknown option ''"),
        ("bounded-staleness:2:", "'2:'"),
        ("bounded-staleness", "as in bounded-staleness:4"),
        ("bounded-staleness:", "bounded-staleness:S: got ''"),
        ("bounded-staleness:-1", "'-1'"),
        ("bounded-staleness:1.5", "'1.5'"),
        ("bounded-staleness:٣", "'٣'"),
        (f"bounded-staleness:{'9' * 5000}", "from 0 to 1000000"),
        ("sync-replicas:aggregate=0", "from 1 to 1000000"),
        ("sync-replicas:aggregate", "aggregate=R: got ''"),
        ("sync-replicas:aggregate=2,tokens=x", "tokens=N: got 'x'"),
        ("sync-replicas:aggregate=2,tokens=x", "as in sync-replicas:aggregate=4,tokens=4"),
        ("sync-replicas:aggregate=1,tokens=1000001", "'1000001'"),
        ("sync-replicas:aggregate=2,aggregate=3", "aggregate twice"),
        ("sync-replicas:tokens=2", "needs aggregate=R"),
        ("sync-replicas:2", "'2'"),
        ("sync-replicas:total=2", "'total=2'"),
        ("local-steps", "local-steps:H: got ''"),
        ("local-steps:async", "local-steps:H: got 'async'"),
        ("local-steps:5,", "unknown option '' of local-steps: expected after=N"),
        ("local-steps:5,async=2", "unknown option 'async=2' of local-steps"),
        ("local-steps:5,async,async", "local-steps has async twice"),
        ("local-steps:5,after=1,async,after=2", "local-steps has after twice"),
        ("local-steps:5,async,bound=x", "bound=R: got 'x'"),
        ("local-steps:5,bound=2", "expected async as well"),
        ("json:nope", "module json has no 'nope'"),
        ("json:", "'json:'"),
        ("math:pi", "names a float; expected a subclass"),
        ("os:system:true", "names a builtin_function_or_method; expected a subclass"),
        ("subprocess:run:true", "names a function; expected a subclass"),
        ("subprocess:Popen:true", "names the class Popen; expected a subclass"),
        ("threading:Thread:x", "names the class Thread; expected a subclass"),
    ],
)
def test_wrong_spec_is_a_config_error(spec: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_policy(spec)
    assert told in str(raised.value)
    assert len(str(raised.value)) < 500


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
    policy = load_policy(f"{plug_in}:Patient{rest}")
    assert type(policy).__name__ == "Patient"
    assert policy.options == options


def test_class_without_a_parameter_is_called_without_options(plug_in: str) -> None:
    assert type(load_policy(f"{plug_in}:Plain")).__name__ == "Plain"


@pytest.mark.parametrize(
    ("attribute", "problem"),
    [
        ("Missing", ": module patience_plug_in has no 'Missing'"),
        ("Broken:x", " cannot be made: KeyError: 'x'"),
        ("Leaving:x", " cannot be made: SystemExit: x"),
        ("plain", " names a function; expected a subclass"),
        ("plain:x", " names a function; expected a subclass"),
        ("Halved", " names the class Halved; expected a subclass of zmqtrain.policies.Policy"),
        ("Long:3", " has most_local_steps=1001; expected a whole number from 0 to 1000"),
        ("Odd:3", " has most_local_steps=None; expected a whole number from 0"),
        ("Half:3", " has most_local_steps=0; expected a whole number from 1, as it has local_"),
        ("Patient:", " ends with a colon"),
        ("Patiant", "; did you mean Patient?"),
    ],
)
def test_wrong_attribute_is_a_config_error(plug_in: str, attribute: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_policy(f"{plug_in}:{attribute}")
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
        load_policy(f"{module}:Policy")
    assert str(raised.value) == f"policy '{module}:Policy' cannot be made: {reason}"


def test_installed_plug_in_is_found_by_name(plug_in: str, tmp_path: Path) -> None:
    """The directory of the plug-in is where packages are looked for."""
    installed = tmp_path / "plug_in-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: plug-in\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[somebody.elses.group]\npatient = json:loads\n"
        f"[zmqtrain.policies]\npatient = {plug_in}:Patient\nhogwild = {plug_in}:Patient\n"
    )
    assert make_policy("patient:ab").staleness_bound == 2
    assert type(make_policy("hogwild")) is Hogwild
    with pytest.raises(ConfigError, match="ends with a colon"):
        make_policy("patient:")


def test_only_the_class_that_the_job_names_is_known_from_a_peer(
    plug_in: str, tmp_path: Path
) -> None:
    (tmp_path / f"{plug_in}.py").rename(tmp_path / "named_late.py")
    plug_in = "named_late"
    with pytest.raises(ConfigError, match="has to be named by the job itself"):
        make_policy(f"{plug_in}:Patient")
    assert plug_in not in sys.modules
    load_policy(f"{plug_in}:Patient:abc")
    assert make_policy(f"{plug_in}:Patient:abcd").staleness_bound == 4
    for other in ("Plain", "Broken:x", "plain"):
        with pytest.raises(ConfigError, match="unknown policy"):
            make_policy(f"{plug_in}:{other}")


@pytest.mark.parametrize(
    ("of_the_job", "of_the_peer", "told"),
    [
        ("Counted:3", "Counted:x", "ValueError: invalid literal"),
        ("Counted:3", "Counted", "ValueError: invalid literal"),
        ("Late", "Late:x", "ValueError: late"),
        ("Unsaid", "Unsaid:x", "unknown policy 'not-a-policy'"),
    ],
)
def test_policy_that_fails_with_a_peers_options_is_refused_before_it_is_used(
    plug_in: str, of_the_job: str, of_the_peer: str, told: str
) -> None:
    load_policy(f"{plug_in}:{of_the_job}")
    with pytest.raises(ConfigError, match=told):
        try_policy(f"{plug_in}:{of_the_peer}")
