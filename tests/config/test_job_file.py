"""Places that a job is loaded from, and errors if it cannot be."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import re
import sys
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import zmqtrain
from tests.modules import Modules
from zmqtrain.config.fit_script import ScriptEnd, is_fit_script, run_fit_script
from zmqtrain.config.job_file import load_job
from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import fingerprint_difference
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.job_fingerprint import job_fingerprint

HEADER = """\
from zmqtrain.data import NoisyLine
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

def line(steps):
    return Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1), steps=steps)

"""
FILES = {
    "trains.py": HEADER + "import zmqtrain\njob = line(1)\nzmqtrain.run(job)\n",
    "own_policy.py": "from zmqtrain.policies.hogwild import Hogwild\nclass Mine(Hogwild): pass\n",
    "notes.txt": "",
    "notes.py": "",
    "named.py": HEADER + "first = line(1)\njob = line(2)\nlast = line(3)\n",
    "only.py": HEADER + "anything = line(4)\n",
    "several.py": HEADER + "a = line(5)\nb = line(6)\n",
    "none.py": "job = 'not one'\n",
    "beside.py": "import only\njob = only.line(7)\n",
    "package/__init__.py": "",
    "package/inside.py": HEADER + "job = line(8)\nother = line(9)\n",
    "syntax.py": "x = 1\ny = = 2\n",
    "indented.py": "\n\n  x = 1\n",
    "raises.py": "x = 1\n\n1 / 0\n",
    "calls.py": "def f():\n    raise OSError('gone')\n\nf()\n",
    "library.py": "import statistics\nstatistics.mean([])\n",
    "lacks.py": "import nobody_has_this\n",
    "extra.py": "raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')",
    "exits.py": "import sys\nsys.exit(3)\n",
    "imports_syntax.py": "\nimport syntax\n",
    "invalid.py": HEADER + "job = line(0)\n",
}

DEFINES = f"""\
from __future__ import annotations
import enum
from dataclasses import dataclass
{HEADER}
class Color(enum.Enum):
    RED = 1

@dataclass
class Options:
    color: Color = Color.RED

def double(number):
    return 2 * number

job = line(1)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with job files; what they import is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), [*sys.path]
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def module_of(path: Path) -> Any:
    (module,) = [m for m in list(sys.modules.values()) if getattr(m, "__file__", "") == str(path)]
    return module


@pytest.mark.parametrize("name", ["mine", "my-job", "job.v2", "random", "test"])
def test_definitions_of_a_job_file_are_found_in_its_module(home: Path, name: str) -> None:
    (home / f"{name}.py").write_text(DEFINES)
    own = sys.modules.get(name)
    assert load_job(f"{name}.py").steps == 1
    module = module_of(home / f"{name}.py")
    assert own is None or sys.modules[name] is own
    assert pickle.loads(pickle.dumps(module.Options())) == module.Options()
    assert pickle.loads(pickle.dumps(module.Color.RED)) is module.Color.RED
    assert typing.get_type_hints(module.Options) == {"color": module.Color}
    assert inspect.getsource(module.double).endswith("return 2 * number\n")


@pytest.mark.parametrize("name", ["mine", "random"])
def test_process_started_by_a_job_finds_its_definitions(home: Path, name: str) -> None:
    (home / f"{name}.py").write_text(DEFINES)
    load_job(f"{name}.py")
    module = module_of(home / f"{name}.py")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(module.double, 21).result() == 42


@pytest.mark.parametrize("name", ["numpy", "pytest"])
def test_file_with_the_name_of_an_installed_package_is_refused(home: Path, name: str) -> None:
    (home / f"{name}.py").write_text(DEFINES)
    with pytest.raises(ConfigError, match=rf"installed package {name} .*; rename the file"):
        load_job(f"{name}.py")


def test_failing_file_keeps_the_module_that_was_loaded_before(home: Path) -> None:
    load_job("named.py")
    module = sys.modules["named"]
    (home / "named.py").write_text("raise ValueError\n")
    with pytest.raises(ConfigError):
        load_job("named.py")
    assert sys.modules["named"] is module


def test_job_edited_within_the_same_second_is_the_new_one(home: Path) -> None:
    assert load_job("named.py").steps == 2
    (home / "named.py").write_text(FILES["named.py"].replace("line(2)", "line(8)"))
    assert load_job("named.py").steps == 8


@pytest.mark.parametrize("reference", ["named.py", "HOME/named.py", "named"])
def test_removed_working_directory_is_reported(
    home: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    with pytest.raises(ConfigError, match="the working directory was removed; change to"):
        load_job(reference.replace("HOME", str(home)))
    os.chdir(home)  # pytest wants to be somewhere


def test_job_that_its_own_modules_import_is_run_once(home: Path) -> None:
    (home / "helper.py").write_text("import mine\n")
    (home / "mine.py").write_text(f"{DEFINES}\nimport helper\n")
    load_job("mine.py")
    assert sys.modules["helper"].mine is sys.modules["mine"]


@pytest.mark.parametrize(
    ("directory", "told"),
    [(".", "give the job as package.relative"), ("package", "give the job as package.relative, ")],
)
def test_job_file_with_relative_imports_is_refused_with_its_module(
    home: Path, directory: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "package/relative.py"
    path.write_text(f"{HEADER}from . import inside\njob = line(1)\n")
    monkeypatch.chdir(home / directory)
    with pytest.raises(ConfigError, match=told) as raised:
        load_job(str(path))
    assert (f"from the directory {home}" in str(raised.value)) == (directory != ".")
    monkeypatch.chdir(home)
    assert load_job("package.relative").steps == 1


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("reference", "steps"),
    [
        ("named.py", 2),
        ("named.py:first", 1),
        ("named.py:last", 3),
        ("only.py", 4),
        ("several.py:b", 6),
        ("beside.py", 7),
        ("package.inside", 8),
        ("package.inside:other", 9),
        ("only:anything", 4),
        ("package/inside.py", 8),
    ],
)
def test_job_is_found(reference: str, steps: int) -> None:
    assert load_job(reference).steps == steps


def test_file_of_another_directory_imports_what_lies_beside_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / "package")
    assert load_job(str(home / "beside.py")).steps == 7


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("syntax.py", "syntax.py, line 2: invalid syntax"),
        ("syntax", "HOME/syntax.py, line 2: invalid syntax"),
        ("imports_syntax.py", "HOME/syntax.py, line 2: invalid syntax"),
        ("indented.py", "indented.py, line 3: unexpected indent"),
        ("raises.py", "raises.py, line 3: ZeroDivisionError: division by zero"),
        ("raises:job", "HOME/raises.py, line 3: ZeroDivisionError: division by zero"),
        ("calls.py", "calls.py, line 2: OSError: gone"),
        ("library.py", "library.py, line 2: StatisticsError"),
        ("lacks.py", "lacks.py, line 1: ModuleNotFoundError: No module named 'nobody_has_this'"),
        ("extra.py", "pip install 'zmqtrain[jax]'"),
        ("exits.py", "exits.py, line 2: SystemExit: 3"),
    ],
)
def test_job_that_does_not_import_is_a_config_error_that_names_the_line(
    home: Path, reference: str, problem: str
) -> None:
    source = reference.partition(":")[0]
    kind = "file" if source.endswith(".py") else "module"
    with pytest.raises(ConfigError) as raised:
        load_job(reference)
    assert str(raised.value).startswith(f"job {kind} {source} cannot be imported: ")
    assert problem.replace("HOME", str(home)) in str(raised.value)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("lost.py", "does not exist (looked in HOME)"),
        ("package.py", "does not exist (looked in HOME)"),
        ("", "''"),
        ("notes.py:", "ends with a colon"),
        ("package.module:", "ends with a colon"),
        ("a:b/job.py", "a:b/job.py does not exist"),
        ("notes.txt", "did you mean notes.py?"),
        ("lost.csv", "is neither a Python file (looked in HOME) nor a module"),
        ("nobody:job", "'nobody' is neither"),
        ("configs/job", "'configs/job' is neither"),
        ("invalid.py", "line 7: the job is not valid: steps is 0"),
        ("none.py", "none.py has no Job; expected one called job"),
        ("several.py", "the Jobs a, b; expected one called job"),
        ("several.py:c", "no Job called 'c'; it has the Jobs a, b"),
        ("none.py:job", "it has no Job"),
        ("only.py:line", "no Job called 'line'; it has the Jobs anything"),
    ],
)
def test_job_that_cannot_be_loaded_is_a_config_error(home: Path, reference: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_job(reference)
    assert told.replace("HOME", str(home)) in str(raised.value)


def test_job_of_other_code_has_another_fingerprint(home: Path) -> None:
    there = load_job("named.py")
    (home / "named.py").write_text(FILES["named.py"].replace("SGD(0.1)", "SGD(0.2 / 2)"))
    here = load_job("named.py")
    difference = fingerprint_difference(job_fingerprint(there), job_fingerprint(here))
    assert difference.startswith("source: ")
    assert ";" not in difference


def test_code_beside_the_job_is_part_of_its_fingerprint(home: Path) -> None:
    there = job_fingerprint(load_job("beside.py"))
    (home / "only.py").write_text(FILES["only.py"] + "more = 1\n")
    del sys.modules["only"]
    here = job_fingerprint(load_job("beside.py"))
    assert fingerprint_difference(there, here).startswith("source: ")


def test_path_and_line_ends_of_a_job_file_are_no_part_of_its_fingerprint(home: Path) -> None:
    elsewhere = home / "package" / "job.py"
    elsewhere.write_bytes(FILES["named.py"].replace("\n", "\r\n").encode())
    there, here = load_job(str(elsewhere)), load_job("named.py")
    assert fingerprint_difference(job_fingerprint(there), job_fingerprint(here)) == ""


def test_flags_leave_a_job_its_source(home: Path) -> None:
    job = load_job("named.py")
    assert job_fingerprint(job.with_overrides(seed=3))["source"] == job_fingerprint(job)["source"]


SCRIPT = "".join(text for text in HEADER.splitlines(True) if text.startswith("from"))
SCRIPT = SCRIPT.replace("from zmqtrain.job import Job", "import zmqtrain")
FIT = "zmqtrain.Trainer(LinearRegression(), SGD(0.1)).fit(NoisyLine())\n"
QUICK = FIT.replace("NoisyLine()", "NoisyLine(), fast_dev_run=True")
MADE = {"made": f"job = line(2)\n{FIT}", "imported": f"from only import anything as job\n{FIT}"}


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":\n    '])
def test_job_of_a_script_is_that_of_its_fit(
    home: Path, guard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{SCRIPT}import only\nprint('before')\n{guard}{FIT}print('behind')\n"
    (home / "script.py").write_text(text)
    main = sys.modules["__main__"]
    try:
        job = load_job("script.py", epochs=7)
    finally:
        sys.modules["__main__"] = main
    assert (type(job.model), job.epochs, job.batch_size) == (LinearRegression, 7, 32)
    assert (capsys.readouterr()) == ("", "before\n")  # stdout is that of a command
    (home / "only.py").write_text(FILES["only.py"] + "more = 1\n")
    del sys.modules["only"]
    other = job_fingerprint(load_job("script.py", epochs=7))
    assert fingerprint_difference(job_fingerprint(job), other).startswith("source: ")
    sys.modules["__main__"] = main


@pytest.mark.parametrize("text", ["x = (", *MADE.values()], ids=["no Python", *MADE])
def test_file_that_may_have_a_job_is_no_such_script(home: Path, text: str) -> None:
    (home / "script.py").write_text(f"{SCRIPT}{text}")
    assert not is_fit_script("script.py")
    assert not is_fit_script("only_in_the_image.py")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "zmqtrain.Trainer(LinearRegression(), SGD(0.1))",
            "neither calls Trainer.fit nor has a Job",
        ),
        ("zmqtrain.Trainer(LinearRegression())\nraise SystemExit(0)", "neither calls Trainer.fit"),
        (f"raise OSError('no disk')\n{FIT}", "script.py, line 5: OSError: no disk"),
        (f"raise SystemExit(2)\n{FIT}", "ended by sys.exit(2); zmqtrain gives it no arguments"),
        (QUICK, "loaded, which every task does; leave that out"),
        (f"job = 'first'\nif __name__ == '__main__':\n    {FIT}", "line 5 has the name job"),
        (f"job = 'first'\n{FIT}", "line 5 has the name job"),
        (
            FIT.replace(").fit", ", ps=2).fit"),
            "Trainer got workers=None and ps=2, but zmqtrain has",
        ),
    ],
)
def test_script_that_makes_no_job_is_refused(home: Path, text: str, told: str) -> None:
    (home / "script.py").write_text(f"{SCRIPT}{text}")
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_job("script.py")


def test_module_with_fit_is_to_be_given_as_a_file(home: Path) -> None:
    (home / "fits.py").write_text(f"{SCRIPT}if __name__ == '__main__':\n    {FIT}")
    with pytest.raises(ConfigError, match=r"give a script with Trainer.fit as a file: .*fits\.py"):
        load_job("fits")


@pytest.mark.parametrize("error", [ConfigError, ScriptEnd])
def test_no_fit_trains_after_one_that_fails(
    home: Path, error: Callable[..., BaseException]
) -> None:
    tries = f"try:\n    {FIT}except BaseException:\n    pass\nelse:\n    exit(9)\n" * 3
    (home / "script.py").write_text(f"{SCRIPT}{tries}raise OSError")
    calls = []

    def train(job: Job) -> Summary:
        calls.append(job)
        raise error(3)

    # What the script raises after the end of a task is a consequence of that.
    with pytest.raises(OSError if error is ConfigError else ScriptEnd):
        run_fit_script("script.py", train)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("behind", ["", "exit(3)"])
def test_script_that_fits_in_a_thread_is_refused_at_its_end(home: Path, behind: str) -> None:
    thread = f"thread = threading.Thread(target=lambda: {FIT.strip()})\n"
    text = f"{SCRIPT}import threading\n{thread}thread.start()\nthread.join()\n{behind}"
    (home / "script.py").write_text(text)
    with pytest.raises(ConfigError, match="in a thread of a script"):
        run_fit_script("script.py", lambda job: pytest.fail("it trains"))


def test_quick_fit_in_a_script_trains_alone(home: Path) -> None:
    (home / "script.py").write_text(f"{SCRIPT}{QUICK}")
    run_fit_script("script.py", lambda job: pytest.fail("no cluster trains"))


def test_trainer_in_a_script_has_the_logdir_of_a_flag(home: Path) -> None:
    trainer = FIT.replace(".fit", "\ntrainer.fit").replace("zmq", "trainer = zmq")
    (home / "script.py").write_text(f"{SCRIPT}{trainer}assert trainer.logdir == 'runs'")
    run_fit_script("script.py", zmqtrain.run, {"logdir": "runs"})


def test_script_fits_once_and_goes_on(home: Path) -> None:
    inner = "zmqtrain.callbacks.LambdaCallback(on_train_end=lambda logs: " + FIT.strip() + ")"
    again = FIT.replace("NoisyLine()", f"NoisyLine(), callbacks=[{inner}]")
    (home / "script.py").write_text(f"{SCRIPT}import zmqtrain.callbacks\n{again}{FIT}")
    summaries = []

    def train(job: Job) -> Summary:
        summaries.append(zmqtrain.run(job, on_progress=lambda status: None))
        return summaries[-1]

    with pytest.raises(ConfigError, match="called for a second time in a script"):
        run_fit_script("script.py", train)
    assert [one.global_step for one in summaries] == [32]


@pytest.mark.usefixtures("home")
def test_job_that_trains_while_it_is_loaded_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        load_job("trains.py")
    assert "trains.py, line " in str(raised.value)
    assert "__main__" in str(raised.value)
    assert load_job("named.py").steps == 2


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import zmqtrain", "zmqtrain.attach"),
        ("import zmqtrain as zt", "zt.attach"),
        ("from zmqtrain import attach as to", "to"),
        ("import zmqtrain.data", "zmqtrain.attach"),
    ],
)
def test_job_file_that_attaches_needs_own_loop(home: Path, imports: str, call: str) -> None:
    script = f'if __name__ == "__main__":\n    {imports}\n    {call}(job)\n'
    path = home / "loop.py"
    path.write_text(f"{HEADER}job = line(2)\n{script}")
    with pytest.raises(ConfigError, match=r"loop\.py calls .*; write own_loop=True"):
        load_job("loop.py", steps=3)
    assert load_job("loop.py", own_loop=True).own_loop
    path.write_text(f"{HEADER}job = line(2).with_overrides(own_loop=False)\n{script}")
    assert not load_job("loop.py").own_loop


def test_other_function_called_attach_is_no_own_loop(home: Path) -> None:
    text = "import zmqtrain\nclass Probe:\n    attach = print\nprobe = Probe()\nprobe.attach()\n"
    (home / "probe.py").write_text(f"{HEADER}{text}job = line(2)\n# zmqtrain.attach(job)\n")
    assert load_job("probe.py", steps=3).steps == 3


def test_policy_beside_the_job_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    job = load_job(str(home / "named.py"))
    assert job.with_overrides(policy="own_policy:Mine").policy == "own_policy:Mine"


def test_keras_without_tensorflow_is_told_to_use_another_backend(
    home: Path, modules: Modules
) -> None:
    (home / "keras_job.py").write_text("import tensorflow\n")
    modules("keras.src", sys)
    modules("tensorflow", None)
    with pytest.raises(ConfigError, match="set KERAS_BACKEND to one before it is imported"):
        load_job("keras_job.py")
