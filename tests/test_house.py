"""The house as DESIGN.md draws it: no circle of imports, nothing private used from outside."""

from __future__ import annotations

from abc import ABC
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.source import ROOT, files_of, read
from zmqtrain.compute.device import Device
from zmqtrain.training.exchange import Exchange


@pytest.mark.parametrize("package", ["zmqtrain", "simulation", "bench"])
def test_modules_import_one_another_in_no_circle(package: str) -> None:
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files_of(package)}
    graph = {
        name: (read(path).imports | read(path).imports_for_types) & paths.keys() - {name}
        for name, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("folder", ["zmqtrain", "bench", "tests"])
def test_modules_use_nothing_private_of_others(folder: str) -> None:
    paths = {str(path.relative_to(ROOT)): path for path in files_of(folder)}
    found = {name: read(path).foreign for name, path in paths.items()}
    of_frameworks = "zmqtrain/adapters/"  # which have no public names for what adapters need
    assert not {
        name: uses for name, uses in found.items() if uses and not name.startswith(of_frameworks)
    }


@pytest.mark.parametrize(
    ("interface", "methods"), [(Device, "load wait store"), (Exchange, "wait_for_end leave")]
)
def test_implementation_without_a_method_is_refused(interface: type[ABC], methods: str) -> None:
    for method in methods.split():
        others = dict.fromkeys(interface.__abstractmethods__ - {method})
        with pytest.raises(TypeError, match=rf"\b{method}\b"):
            type("Forgetful", (interface,), others)()
