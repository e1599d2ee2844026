"""The prose and the shape of the project agree with its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zmqtrain
from tests.source import ROOT, files_of, read
from zmqtrain.store.manifest import FORMAT
from zmqtrain.wire.messages import PROTOCOL_VERSION

PACKAGE = ROOT / "zmqtrain"
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "DESIGN.md").read_text()

ORDER = """
errors hints user_code units texts files fingerprint models metrics compute protocol wire transport
policies optim data store adapters observe callbacks job_conflicts job_checks job training config
planning actors coordination server exchanges chief hosting roles local clusters cli
""".split()
"""The parts of the package. Each imports itself and those before it, and none after it."""

PURE = [
    "wire",
    "policies",
    "planning",
    *(
        f"coordination/{name}.py"
        for name in (
            "coordinator",
            "events",
            "ledger",
            "arrivals",
            "waiting",
            "measuring",
            "endings",
        )
    ),
    "optim",
    "store",
]
"""Parts that know neither an event loop nor sockets."""


@pytest.mark.parametrize("page", ["CHANGELOG.md", "docs/upgrades.md"])
def test_numbers_of_protocol_and_format_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text()
    assert re.findall(r"\(protocol (\d+)\)", text) == [str(PROTOCOL_VERSION)]
    assert re.findall(r"whose format is (\d+)", text) == [str(FORMAT)]


def parts_imported_by(path: Path) -> set[str]:
    """Return the parts of the package that a file imports, those for type checkers left out."""
    names = (name.split(".") for name in read(path).imports)
    return {parts[1] for parts in names if parts[0] == "zmqtrain" and parts[1:]}


def libraries_imported_by(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in read(path).imports}


def test_every_part_of_the_package_has_its_place_in_the_order_of_imports() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert parts - {"py"} == set(ORDER)


@pytest.mark.parametrize("part", ORDER)
def test_part_of_the_package_imports_one_way(part: str) -> None:
    later = set(ORDER[ORDER.index(part) + 1 :])
    for path in files_of(f"zmqtrain/{part}"):
        found = parts_imported_by(path) & later
        assert not found, f"{path.relative_to(PACKAGE)} imports {sorted(found)}"


def test_training_loop_knows_no_wire() -> None:
    for path in files_of("zmqtrain/training"):
        found = parts_imported_by(path) & {"wire", "transport", "actors", "config"}
        assert not found, path.name


@pytest.mark.parametrize("part", PURE)
def test_pure_part_knows_neither_event_loop_nor_sockets(part: str) -> None:
    for path in files_of(f"zmqtrain/{part}"):
        assert not libraries_imported_by(path) & {"asyncio", "zmq", "uvloop"}, path.name


def test_only_the_transport_imports_zmq() -> None:
    users = [path for path in files_of("zmqtrain") if "zmq" in libraries_imported_by(path)]
    assert {path.parent.name for path in users} == {"transport"}


def test_public_names_are_those_declared() -> None:
    assert sorted(zmqtrain.__all__) == [
        *("History", "Job", "Summary", "Trainer", "__version__", "attach", "load", "run")
    ]
    for name in zmqtrain.__all__:
        assert getattr(zmqtrain, name) is not None


def test_contributing_lists_every_file_and_folder_of_the_package() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The files")[1]
    for path in PACKAGE.iterdir():
        if path.name.startswith("__") or path.name == "py.typed":
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name in tree, f"the tree leaves out {name}"
    for name in re.findall(r"\b([a-z_]+\.py)\b", tree):
        assert (PACKAGE / name).exists(), f"the tree names {name}, which is not there"


def test_readme_is_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 150


def test_every_dependency_earns_its_place_in_the_design() -> None:
    declared = re.search(r"\ndependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.S)
    assert declared
    for name in re.findall(r'"([a-z-]+)>=', declared[1]):
        assert re.search(rf"^\| .*\b{name}\b.* \|", DESIGN, re.MULTILINE), name


def test_files_named_in_the_design_exist() -> None:
    decisions = "".join(page.read_text() for page in (ROOT / "docs/decisions").glob("*.md"))
    text = DESIGN + (ROOT / "CONTRIBUTING.md").read_text() + decisions
    for name in re.findall(r"`([a-z0-9_/]+\.py)`", text):
        assert (ROOT / name).exists() or (PACKAGE / name).exists(), name


def test_markdown_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
