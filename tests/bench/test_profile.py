"""Where a step's time goes: the parts, the options, the plot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bench.plot import COLOURS, draw
from bench.profile import PARTS, parts_of

PNG = b"\x89PNG\r\n\x1a\n"
MEANS = {"data": 0.001, "pull": 0.002, "compute": 0.01, "push": 0.004, "wait": 0.006}


class FakeCounting:
    """Has observed ``MEANS``, and updates of so many seconds."""

    def __init__(self, apply_s: float) -> None:
        self._apply_s = apply_s

    def mean(self, tasks: str, name: str, label: str = "") -> float:
        if (tasks, name) == ("ps 0", "apply_duration_seconds"):
            return self._apply_s
        assert (tasks, name) == ("worker", "phase_duration_seconds")
        return MEANS[label]


def row(policy: str, lane: str, scale: float = 1.0) -> dict[str, Any]:
    parts = {f"{part}_ms": scale * (1 + number) for number, part in enumerate(PARTS)}
    return {
        "policy": policy,
        "lane": lane,
        "job": "digits",
        "hidden": 0,
        "batch_size": 10,
        "rule": "sgd",
        "ps": 1,
        "workers": 1,
        "steps_per_second": 1234.5,
        "step_ms": sum(parts.values()),
        **parts,
    }


def test_update_is_taken_out_of_the_wait() -> None:
    parts = parts_of(FakeCounting(apply_s=0.001))  # type: ignore[arg-type]
    assert (parts["wait_ms"], parts["apply_ms"]) == (pytest.approx(5), pytest.approx(1))


@pytest.mark.parametrize("apply_s", [0.0, 0.001, 0.006, 0.5])
def test_parts_add_up_to_the_step_and_none_is_negative(apply_s: float) -> None:
    parts = parts_of(FakeCounting(apply_s))  # type: ignore[arg-type]
    step_ms = parts.pop("step_ms")
    assert step_ms == pytest.approx(sum(parts.values())) == pytest.approx(1e3 * sum(MEANS.values()))
    assert set(parts) == {f"{part}_ms" for part in PARTS} and min(parts.values()) >= 0


@pytest.mark.integration
def test_profile_of_a_run_has_time_in_every_part(
    rows_of: Callable[..., list[dict[str, Any]]],
) -> None:
    options = "--policy sync-replicas --lane tcp --hidden 0 --steps 200 --rule sgd"
    (found,) = rows_of("profile", *options.split())
    assert (found["bench"], found["policy"], found["lane"]) == ("profile", "sync-replicas", "tcp")
    assert (found["job"], found["hidden"], found["steps"]) == ("digits", 0, 200)
    # Where one update took long, it can be all of the mean wait.
    assert all(found[f"{part}_ms"] > 0 for part in PARTS if part != "wait")
    assert found["wait_ms"] >= 0
    assert found["steps_per_second"] > 0


def test_every_policy_is_run_on_every_lane(
    trainings: list[dict[str, str]], rows_of: Callable[..., list[dict[str, Any]]]
) -> None:
    rows = rows_of("profile", "--policy", "hogwild,sync-replicas", "--lane", "tcp,shm")
    assert len(rows) == len(trainings)
    assert [(run["policy"], run["lane"]) for run in trainings] == [
        ("hogwild", "tcp"),
        ("hogwild", "shm"),
        ("sync-replicas", "tcp"),
        ("sync-replicas", "shm"),
    ]


@pytest.mark.usefixtures("trainings")
def test_table_explains_its_parts(invoke: Callable[..., Result]) -> None:
    result = invoke("profile", "--policy", "hogwild")
    last = result.stdout.splitlines()[-len(PARTS) :]
    assert [line.split()[0] for line in last] == list(PARTS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "hogwild,sometimes"], "unknown policy 'sometimes'"),
        (["--lane", "post"], "'post'"),
        (["--plot", "step.txt"], "ends in none of .png, .svg, .pdf"),
        (["--plot", "absent/step.png"], "the directory absent does not exist"),
    ],
)
def test_wrong_option_is_refused_before_anything_runs(
    arguments: list[str],
    expected: str,
    trainings: list[dict[str, str]],
    refusal_of: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refusal_of("profile", *arguments)
    assert trainings == []


def test_plot_without_matplotlib_says_how_to_install_it(
    trainings: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    invoke: Callable[..., Result],
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # what the import system takes for absent
    result = invoke("profile", "--plot", str(tmp_path / "step.png"))
    expected = "Error: --plot needs Matplotlib: pip install 'zmqtrain[bench]'\n"
    assert (result.exit_code, result.stderr, trainings) == (1, expected, [])


def test_every_part_has_a_colour() -> None:
    assert len(PARTS) == len(COLOURS)


@pytest.mark.parametrize(
    "rows",
    [
        [row("hogwild", "shm")],
        [row("hogwild", "shm", 1e-3), row("hogwild", "tcp"), row("sync-replicas", "tcp", 1e3)],
    ],
    ids=["one bar", "bars of any size"],
)
def test_plot_is_written_as_a_picture(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.figure")
    path = tmp_path / "step.png"
    draw(path, rows, PARTS, "some machine")
    assert path.read_bytes().startswith(PNG)


def test_plot_has_a_bar_for_each_row_with_its_policy_and_lane(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.figure")
    path = tmp_path / "step.svg"
    draw(path, [row("hogwild", "shm"), row("hogwild", "tcp")], PARTS, "some machine")
    comments = [line.strip() for line in path.read_text().splitlines() if "<!--" in line]
    texts = [line.removeprefix("<!-- ").removesuffix(" -->") for line in comments]
    assert [text for text in texts if text in ("shm", "tcp", "hogwild")] == [
        "shm",
        "tcp",
        "hogwild",
    ]
    assert "21.0 ms, 1,234 steps/s" in texts
    assert {f"{part}: {meaning}" for part, meaning in PARTS.items()} <= set(texts)
