"""Commands, programs and links in the pages for users work."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest

import zmqtrain
from tests.modules import Modules
from zmqtrain.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if "decisions" not in page.parts and page.name != "commands.md"
}
BLOCK = re.compile(
    r"(<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL
)
TESTED_ELSEWHERE = {
    *("README.md", "docs/tutorial.md"),  # below
    "docs/ecosystem.md",  # tests/adapters/test_ecosystem.py
    *(page for page in PAGES if "```python" not in PAGES[page]),
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, DOCS / name)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def blocks(page: str, language: str) -> Iterator[tuple[str, str]]:
    """Yield the note before each block of code in this language, and its text."""
    for match in BLOCK.finditer(PAGES[page]):
        if match["language"] == language:
            yield match["note"] or "", match["text"]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the calls of zmqtrain in a page's blocks, without those that only name arguments."""
    indented = re.findall(r"(?:^ {4}.*\n)+", PAGES[page], re.MULTILINE)
    fenced = [match["text"] for match in BLOCK.finditer(PAGES[page])]
    for line in re.sub(r" *\\\n *", " ", "\n".join([*indented, *fenced])).splitlines():
        if line.strip().startswith("zmqtrain ") and "..." not in line:
            yield shlex.split(line.split(" | ")[0].split(" > ")[0], comments=True)[1:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_have_the_options_that_it_gives(page: str) -> None:
    for words in commands(page):
        with cli.make_context("zmqtrain", [words[0], "--help"], resilient_parsing=True) as context:
            command, rest = cli.get_command(context, words[0]), words[1:]
            while isinstance(command, click.Group):
                command, rest = command.get_command(context, rest[0]), rest[1:]
            assert command is not None, words
            try:
                command.make_parser(context).parse_args(list(rest))
            except click.UsageError as error:
                pytest.fail(f"{' '.join(words)}: {error.message}")


def test_every_link_of_the_pages_leads_to_a_file(tmp_path: Path) -> None:
    script("stage.py").stage(tmp_path / "site")
    assert (tmp_path / "site" / "benchmarks.md").exists()


@pytest.mark.parametrize(
    "name", ["job.md", "task.md", "commands.md", "metrics.md", "exit_codes.md"]
)
def test_reference_is_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = script("reference/generate.py").page(name)
    assert (DOCS / "reference" / name).read_text() == text, "run docs/reference/generate.py"


def test_navigation_of_the_site_has_every_page() -> None:
    listed = set(re.findall(r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text()))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert pages <= listed


def run_shortly(text: str, names: dict[str, Any]) -> None:
    """Run a program, whose own training is one pass over the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZMQTRAIN_EPOCHS", "1")
        exec(text, names)


def programs(page: str) -> Iterator[str]:
    """Yield the blocks of Python of a page that can run here."""
    for note, text in blocks(page, "python"):
        verb, _, name = note.partition(" ")
        if verb != "not" and (verb != "needs" or importlib.util.find_spec(name)):
            yield text


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in TESTED_ELSEWHERE])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_programs_of_a_page_train(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may go on from those before it. A few steps of each job show that it trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    names: dict[str, Any] = {"__name__": "net"}
    texts = [*programs(page)]
    if not texts:
        pytest.skip("its framework is not installed")
    for text in texts:
        job = names.get("job")
        run_shortly(text, names)
        new = names.get("job")
        if "__main__" in text and new is job:  # a script with a Trainer
            run_shortly(text, names | {"__name__": "__main__"})
        if not isinstance(new, zmqtrain.Job) or new is job:
            continue
        if new.own_loop:
            run_shortly(text, names | {"__name__": "__main__"})
        else:
            few = {"epochs": 1} if new.epochs else {"steps": 3}
            assert zmqtrain.run(new.with_overrides(**few)).global_step > 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_programs_of_the_tutorial_train_resume_and_predict(
    tmp_path: Path,
    modules: Modules,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    net, predict, own_data = (text for _, text in blocks("docs/tutorial.md", "python"))
    names: dict[str, Any] = {"__name__": "net"}
    exec(net, names)
    modules("net", SimpleNamespace(**names))
    job = names["job"].with_overrides(logdir="runs/net", epochs=1)
    first = zmqtrain.run(job, workers=2)
    second = job.with_overrides(epochs=2, policy="sync-replicas")
    assert zmqtrain.run(second, workers=3, ps=2).global_step > first.global_step
    exec(predict, {"__name__": "__main__"})
    exec(own_data, {"__name__": "__main__"})
    accuracy, loss = map(float, capsys.readouterr().out.split()[-2:])
    assert accuracy > 0.5
    assert loss < 0.01
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 3
