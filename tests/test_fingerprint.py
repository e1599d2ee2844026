"""Differences between two jobs, in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.fingerprint import (
    canonical,
    changes_since,
    epochs_text,
    fingerprint_difference,
    remedy_of_difference,
)
from zmqtrain.optim import SGD, Adam
from zmqtrain.optim.pipeline import Update
from zmqtrain.optim.schedules import Cosine

BEFORE, OTHER_RULE, SCHEDULED = map(Update, (Adam(0.001), SGD(0.1), Adam(Cosine(0.1, 9))))


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (Update(Adam(0.002)), "learning_rate=0.001 then, learning_rate=0.002 now"),
        (
            Update(Adam(0.002), l2=0.1),
            "learning_rate=0.001, l2=0.0 then, learning_rate=0.002, l2=0.1 now",
        ),
        (OTHER_RULE, f"{BEFORE} then, {OTHER_RULE} now"),
        (SCHEDULED, f"{BEFORE} then, {SCHEDULED} now"),
    ],
)
def test_of_an_optimizer_that_has_changed_only_other_values_are_told(
    now: Update, told: str
) -> None:
    then = {"optimizer": repr(BEFORE), "seed": "0"}
    assert changes_since(then, then | {"optimizer": repr(now)}) == f"optimizer: {told}"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({}, "model: nothing there, MLP(64, 10) here"),
        ({"model": "MLP(64, 9)"}, "model: MLP(64, 9) there, MLP(64, 10) here"),
    ],
)
def test_what_has_no_names_is_told_as_a_whole(theirs: dict[str, str], told: str) -> None:
    assert fingerprint_difference(theirs, {"model": "MLP(64, 10)"}) == told


@pytest.mark.parametrize(
    ("epochs", "steps", "told"),
    [
        (0, 0, ""),
        (1, 0, "1 epoch"),
        (5, 100, "5 epochs of 100 batches"),
        (2, 1, "2 epochs of 1 batch"),
    ],
)
def test_epochs_are_told_with_their_units(epochs: int, steps: int, told: str) -> None:
    assert epochs_text(epochs, steps) == told


class Bare:
    pass


class OfMain:
    pass


OfMain.__module__ = "__main__"


@dataclass
class Options:
    words: frozenset[str]
    more: Any = None


def text_of(value: object) -> str:
    return canonical(repr(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a"}, "{'a', 'b'}"),
        (frozenset("ba"), "frozenset({'a', 'b'})"),
        ({"b": {3, 20, 1}, "a": ["z", "y"]}, "{'a': ['z', 'y'], 'b': {1, 20, 3}}"),
        (Options(frozenset("ba"), {"k": {"y", "x"}}),
         "Options(words=frozenset({'a', 'b'}), more={'k': {'x', 'y'}})"),
        ({"}, {", "it's"}, "{\"it's\", '}, {'}"),
        (partial(max, {"b", "a"}), "functools.partial(<built-in function max>, {'a', 'b'})"),
        (Bare(), "<Bare object>"),
        ([Bare], "[<class 'Bare'>]"),
        (OfMain(), "<OfMain object>"),
        (text_of, "<function text_of>"),
        (lambda x: x, "<function <lambda>>"),
        (Bare().__str__, "<method-wrapper '__str__' of Bare object>"),
        ((1, 2.5, [3, 1], b"a, b"), "(1, 2.5, [3, 1], b'a, b')"),
        (set(), "set()"),
        ({}, "{}"),
    ],
)  # fmt: skip
def test_text_of_a_value_is_the_same_in_every_process(value: object, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize("text", ["Net(a {b", "a) b", "{(}", "the user's {", "x{1, 2]"])
def test_text_whose_brackets_do_not_match_stays_as_it_is(text: str) -> None:
    assert canonical(text) == text


class FrozenDict(dict[str, Any]):
    """A dict that may be in a set."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Reordered:
    """Shows the members of a set in the other order."""

    def __init__(self, members: frozenset[Any]) -> None:
        self._members = [*map(reordered, reversed(list(members)))]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self._members))
        return f"frozenset({{{shown}}})" if shown else "frozenset()"


def reordered(value: Any) -> Any:
    """Return something with the repr of a value as another process may have it."""
    match value:
        case frozenset():
            return Reordered(value)
        case tuple():
            return tuple(map(reordered, value))
        case Mapping():
            return {key: reordered(value[key]) for key in reversed(list(value))}
    return value


words = st.text("ab{}[](), '\"\\:", max_size=4)
values = st.recursive(
    words | st.integers(),
    lambda inner: st.one_of(
        st.frozensets(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(words, inner, max_size=3).map(FrozenDict),
    ),
    max_leaves=8,
)


@given(values, values)
def test_two_values_have_one_text_if_they_are_equal(one: object, other: object) -> None:
    assert (text_of(one) == text_of(other)) == (one == other)
    assert text_of(reordered(one)) == text_of(one)


JOB = """
import zmqtrain
from dataclasses import dataclass
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

class Model(LinearRegression):
    words = frozenset("some words that no two processes keep in one order".split())

    def __repr__(self):
        return f"Model({set(self.words)}, {self.words}, {object()}, {Model})"

@dataclass(frozen=True)
class Rate:
    steps: frozenset = frozenset({"first", "second", "third", "fourth"})

    def __call__(self, step):
        return 0.1

job = zmqtrain.Job(model=Model(), data=NoisyLine(), optimizer=SGD(Rate()), steps=3)
"""


def test_one_job_has_one_fingerprint_whatever_the_order_of_its_sets(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    code = (
        "import sys; from zmqtrain.config.job_file import load_job; "
        "from zmqtrain.planning.job_fingerprint import job_fingerprint; "
        "print(job_fingerprint(load_job(sys.argv[1])))"
    )
    told = {
        subprocess.check_output([sys.executable, "-c", code, path], env={"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert b"'model': \"Model({" in told.pop()


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        ({"model"}, "give the object a __repr__"),
        ({"optimizer"}, "give the object a __repr__"),
        ({"data"}, "give what is random in them a fixed seed"),
        ({"model", "data"}, "Start every task with the same job file, data and options"),
        ({"data", "source"}, "needs a seed, as in numpy.random.default_rng(0)"),
        ({"parameters"}, "One job has built two models"),
        ({"frozen"}, "One job has built two models"),
        ({"frozen", "source"}, "Start every task with the same job file, data and options"),
        ({"model", "source"}, "Start every task with the same job file, data and options"),
    ],
)
def test_remedy_fits_what_differs_in_one_job_file(differing: set[str], told: str) -> None:
    ours = dict.fromkeys(("model", "optimizer", "data", "source", "parameters"), "one")
    theirs = ours | dict.fromkeys(differing, "another")
    assert told in remedy_of_difference(theirs, ours)
