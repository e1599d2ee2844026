"""Jobs: what they accept, and how tasks tell them apart."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.plans import planned
from tests.recommenders import Recommender
from tests.recommenders import make_job as recommender_job
from zmqtrain.callbacks import LambdaCallback
from zmqtrain.data import Arrays, NoisyLine
from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import fingerprint_difference
from zmqtrain.job import Job
from zmqtrain.metrics import MeanAbsoluteError
from zmqtrain.models import MLP, LinearRegression
from zmqtrain.models.tables import Normal, Table
from zmqtrain.optim import SGD, Adagrad, Adam, Update
from zmqtrain.planning.job_fingerprint import job_fingerprint


def job(**fields: Any) -> Job:
    line: dict[str, Any] = {"model": LinearRegression(), "data": NoisyLine(), "optimizer": SGD(0.1)}
    return Job(**line | fields)


class Handmade:
    """A model without a repr of its own, whose parameters are given."""

    def __init__(self, parameters: Any = None) -> None:
        self._parameters = {"w": np.zeros(3, np.float32)} if parameters is None else parameters

    def parameters(self, seed: int) -> Any:
        if isinstance(self._parameters, Exception):
            raise self._parameters
        return self._parameters

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        return 0.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


class HandmadeRule:
    slots = ()

    def update(self, parameters: Any, gradient: Any, slots: Any, step: int) -> None:
        """Learn nothing."""


# Fields


MODEL = "not a Model: it needs the methods loss_and_gradients, metrics, parameters"
BOUND = "policy bounded-staleness:S: got '-1', expected a whole number from 0 to 1000000"
ROOM = "expected less than 4611686018427387904"
AVERAGE = (
    "the job keeps no moving average; expected a decay, such as --moving-average 0.99; "
    "give one, or use --no-evaluate-average"
)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("model", 3, MODEL),
        ("model", None, MODEL),
        ("data", [1, 2], "data is [1, 2]; the examples are int; expected arrays"),
        ("policy", "hog" * 40, "policy is 'hoghog"),
        ("data", [object()], "not valid: data: the examples are object; expected arrays"),
        ("data", ((1,), (2,)), "evaluation set are zmqtrain.data.Arrays(train, evaluation)"),
        ("data", (1, (2,)), "take(indices); convert lists with numpy.array"),
        ("data", ({"x": 1}, {"x": 2}), "TorchDataset(rows); a training and an evaluation set are"),
        ("data", [{"x": 1}, {"x": 2}], "give one dict for all arrays, or zmqtrain.data.TorchDat"),
        ("data", (np.ones(3), np.ones(2)), "expected at least one array, all with the same"),
        ("optimizer", "sgd", "not a Rule: it needs the methods slots, update"),
        ("optimizer", SGD, "this is a class; expected an object: write SGD(...)"),
        ("policy", "nope", "unknown policy 'nope'"),
        ("policy", "bounded-staleness:-1", BOUND),
        ("policy", 3, "expected a text"),
        ("batch_size", 0, "expected at least 1"),
        ("batch_size", 1.5, "expected a whole number"),
        ("steps", 1 << 62, ROOM),
        ("batch_size", 1 << 64, ROOM),
        ("evaluate_average", True, AVERAGE),
        ("steps", -5, "expected at least 1"),
        ("seed", -1, "expected at least 0"),
        ("evaluate_every", -1, "expected at least 0"),
        ("save_secs", -1.5, "expected at least 0"),
        ("save_steps", -1, "expected at least 0"),
        ("steps_per_epoch", 5, "expected their number; give epochs"),
        ("callbacks", [LambdaCallback(on_steps=print, every_steps=0.5)], "LambdaCallback is 0.5"),
        ("keep_checkpoints", 0, "expected at least 1"),
        ("l2", -0.1, "expected at least 0"),
        ("l2", float("inf"), "expected a finite number"),
        ("clip_norm", 0, "expected more than 0"),
        ("clip_norm", float("nan"), "expected a finite number"),
        ("clip_norm_each", -1, "expected more than 0"),
        ("clip_value", 0, "expected more than 0"),
        ("moving_average", 1, "expected less than 1"),
        ("max_nonfinite", -1, "expected at least 0"),
        ("partition_nbytes", -1, "expected at least 0"),
        ("prefetch", 65, "expected at most 64"),
        ("placement", "random", "expected 'round-robin', 'greedy' or 'contiguous'"),
        ("device", "tpu", "expected 'cpu' or 'gpu'"),
        ("stepz", 3, "did you mean steps?"),
        ("exchange", "ring", "direct, to-one, one-shot or nccl; no ring is here: use direct"),
        ("optimizer", HandmadeRule(), "make the update rule a frozen dataclass"),
    ],
)
def test_wrong_field_is_a_config_error(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job(**{field: value})
    assert field in str(raised.value)
    assert problem in str(raised.value)


def test_average_is_evaluated_by_a_job_that_keeps_one() -> None:
    kept = job(moving_average=0.0).with_overrides(evaluate_average=True)
    assert kept.evaluate_average


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        job(steps=0, device="tpu")
    assert "steps is 0; expected at least 1" in str(raised.value)
    assert "device is 'tpu'; expected 'cpu' or 'gpu'" in str(raised.value)


def test_job_without_its_objects_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as raised:
        Job(model=LinearRegression())
    for example in ("data=(inputs, targets)", "optimizer=zmqtrain.optim.AdamW(0.001)"):
        name = example.partition("=")[0]
        assert re.search(rf"{name} is missing; .*{re.escape(example)}", str(raised.value))


# Overrides


def test_overrides_replace_the_fields_given() -> None:
    before = job(steps=50, batch_size=7)
    after = before.with_overrides(steps=60, policy="sync-replicas", logdir=None, batch_size=None)
    assert (after.steps, after.policy, after.batch_size) == (60, "sync-replicas", 7)
    assert after.model is before.model
    assert before.steps == 50


@pytest.mark.parametrize("name", ["data", "data_dir"])
def test_directory_of_the_data_can_be_overridden(name: str) -> None:
    assert job(data_dir="before").with_overrides(**{name: "after"}).data_dir == "after"
    assert job(data_dir="before").with_overrides(**{name: None}).data_dir == "before"


@pytest.mark.parametrize(
    ("fields", "overrides", "problem"),
    [
        ({}, {"steps": 0}, "steps is 0; expected at least 1"),
        ({}, {"policy": "x"}, "unknown policy 'x'"),
        ({}, {"modell": 1}, "did you mean model?"),
        ({"clip_norm": 1}, {"overlap": True}, "clip_norm needs the whole gradient"),
        ({"clip_norm_each": 1}, {"overlap": True}, "clip_norm_each needs the whole gradient"),
        ({"clip_norm": 1}, {"clip_value": 2}, "the job has clip_norm and clip_value; expected one"),
        ({"clip_norm": 1}, {"clip_norm_each": 2}, "the job has clip_norm and clip_norm_each"),
        ({"devices": "gpu:0"}, {"overlap": True}, "devices needs the whole gradient"),
    ],
)
def test_wrong_override_is_a_config_error(
    fields: dict[str, Any], overrides: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        job(**fields).with_overrides(**overrides)
    assert problem in str(raised.value)


# Parameters and data


def test_update_is_the_optimizer_with_the_jobs_regularisation() -> None:
    update = job(l2=0.5, moving_average=0.9).update()
    assert (update.rule, update.l2, update.moving_average) == (SGD(0.1), 0.5, 0.9)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"w": np.zeros(3, np.float32), "b": np.zeros(3)}, "'b' of MODEL is a float64 ndarray"),
        ({"w": 1.5}, "'w' of MODEL is a float;"),
        ({"w": [1.5]}, "'w' of MODEL is a list;"),
        ({}, "MODEL has no parameters"),
        ([1, 2], "of MODEL returned [1, 2];"),
        ({3: 4}, "of MODEL returned {3: 4};"),
    ],
)
def test_wrong_parameters_are_a_config_error(parameters: Any, told: str) -> None:
    model = Handmade(parameters)
    with pytest.raises(ConfigError) as raised:
        job(model=model).initial_parameters()
    assert told.replace("MODEL", repr(model)) in str(raised.value)


def test_model_that_raises_is_a_config_error_that_names_the_line() -> None:
    with pytest.raises(ConfigError) as raised:
        job(model=Handmade(RuntimeError("no weights here"))).initial_parameters()
    assert "RuntimeError: no weights here" in str(raised.value)
    assert f"{__file__}, line " in str(raised.value)


def test_data_is_loaded_from_the_jobs_directory() -> None:
    seen: list[str | None] = []

    class Recorded:
        def load(self, directory: str | None) -> Any:
            seen.append(directory)
            return NoisyLine(examples=10).load(directory)

    training, evaluation = job(data=Recorded(), data_dir="there", batch_size=10).load_data()
    assert seen == ["there"]
    assert evaluation is not None
    assert (len(training), len(evaluation)) == (10, 2)


@pytest.mark.parametrize("batch_size", [11, 10**15])
def test_batch_of_more_examples_than_there_are_is_a_config_error(batch_size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size is {batch_size}, .* 10 examples"):
        job(data=NoisyLine(examples=10), batch_size=batch_size).load_data()


def test_model_without_a_repr_gives_the_job_the_name_of_its_class() -> None:
    class Plain(LinearRegression):
        __repr__ = object.__repr__

    assert job(model=Plain()).name == "Plain"
    assert job(model=LinearRegression()).name == repr(LinearRegression())


# Fingerprints


def test_model_without_a_repr_has_the_same_fingerprint_in_every_process() -> None:
    models = [Handmade(), Handmade()]
    assert repr(models[0]) != repr(models[1])
    there, here = (job_fingerprint(job(model=model)) for model in models)
    assert fingerprint_difference(there, here) == ""


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"batch_size": 32}, "batch_size: 100 there, 32 here"),
        ({"policy": "sync-replicas"}, "policy: hogwild there, sync-replicas here"),
        ({"seed": 1, "steps": 9}, "seed: 0 there, 1 here; steps: 1000 there, 9 here"),
        (
            {"optimizer": Adam(0.5)},
            f"optimizer: {Update(SGD(0.1))} there, {Update(Adam(0.5))} here",
        ),
        (
            {"placement": "round-robin", "partition_nbytes": 0},
            "placement: greedy, 262144 B parts, 1 ps there, round-robin, 0 B parts, 1 ps here",
        ),
    ],
)
def test_difference_of_two_jobs_shows_both_sides(fields: dict[str, Any], difference: str) -> None:
    there, here = planned(job()).fingerprint(), planned(job(**fields)).fingerprint()
    assert fingerprint_difference(there, here) == difference


@pytest.mark.parametrize("entry", ["source", "data"])
def test_entry_that_one_side_cannot_give_is_not_compared(entry: str) -> None:
    there, here = {"seed": "0", entry: "x"}, {"seed": "0"}
    assert fingerprint_difference(there, here) == fingerprint_difference(here, there) == ""
    assert fingerprint_difference(there, here | {entry: "y"}) == f"{entry}: x there, y here"


def test_shapes_and_names_of_parameters_are_part_of_the_fingerprint() -> None:
    zeros = np.zeros((2, 3), np.float32)
    there, renamed, reshaped = (
        job_fingerprint(job(model=Handmade(parameters)))
        for parameters in ({"w": zeros}, {"v": zeros}, {"w": zeros.T})
    )
    for other in (renamed, reshaped):
        assert fingerprint_difference(there, other).startswith("parameters: 1 variables, 6 elem")


def test_long_texts_are_cut_but_still_distinguish_jobs() -> None:
    @dataclass(frozen=True)
    class Wordy(Handmade):
        text: str

        def parameters(self, seed: int) -> Any:
            return {"w": np.zeros(3, np.float32)}

    there, here = (job_fingerprint(job(model=Wordy("x" * 5000 + end))) for end in "ab")
    assert len(there["model"]) < 450
    assert there["model"] != here["model"]


def test_mistake_of_a_model_is_not_reported_as_one_of_its_metrics() -> None:
    class Unbuilt(MLP):
        @property
        def summed_metrics(self) -> object:
            raise ConfigError("no loss")

    with pytest.raises(ConfigError, match=r"^no loss$"):
        job(model=Unbuilt(64, 4, 10))


def test_one_option_ends_a_job_and_an_override_takes_the_place_of_the_other_one() -> None:
    for steps in (3, 1000):
        with pytest.raises(ConfigError, match=f"steps is {steps} and epochs is 2; expected one"):
            job(steps=steps, epochs=2)
    by_steps, by_epochs = job(steps=7), job(epochs=2)
    assert by_epochs.with_overrides(steps=5).steps == 5
    assert by_epochs.with_overrides(steps=5).epochs == 0
    assert by_steps.with_overrides(epochs=3).epochs == 3
    assert by_steps.with_overrides(epochs=3).steps > 10**9
    with pytest.raises(ConfigError, match="expected one of them"):
        by_steps.with_overrides(epochs=3, steps=5)


def test_one_option_decides_where_workers_compute() -> None:
    with pytest.raises(ConfigError, match=r"device is 'gpu'.*devices=cpu:0,cpu:1"):
        job(device="gpu", devices=("cpu:0", "cpu:1"))
    assert job(devices="cpu:0,cpu:1").with_overrides(device="gpu").devices == ()
    assert job(device="gpu").with_overrides(devices="cpu:0").device == "cpu"


@pytest.mark.parametrize("fields", [{"evaluate_every": 5}, {"metrics": [MeanAbsoluteError()]}])
def test_options_that_need_an_evaluation_set_are_refused_without_one(
    fields: dict[str, Any],
) -> None:
    x = np.ones((200, 1), np.float32)
    with pytest.raises(ConfigError, match="no evaluation set, so nothing would be measured"):
        job(data=Arrays((x, x)), **fields).load_data()
    assert job(data=Arrays((x, x), (x, x)), **fields).load_data()[1] is not None
    measures_training = {"metrics": [MeanAbsoluteError()], "epochs": 1}
    assert job(data=Arrays((x, x)), **measures_training).load_data()[1] is None


def test_variable_name_that_utf8_cannot_encode_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="expected whole characters"):
        job(model=Handmade({"half \ud800": np.zeros(1, np.float32)})).variables()


def test_tables_are_updated_by_their_own_rule_or_that_of_the_first_group_that_fits() -> None:
    of = recommender_job(
        optimizer=Adagrad(0.5),
        l2=0.1,
        moving_average=0.9,
        clip_value=1.0,
        groups={"user": {"learning_rate": 0.25}, "*": {"l2": 0.0}},
        tables={"item": Table(optimizer=SGD(2.0))},
    )
    user, item = of.table_updates()
    assert user == Update(Adagrad(0.25), 0.1, clip_value=1.0)
    assert item == Update(SGD(2.0), 0.0, clip_value=1.0)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["user"], None),
        (["user", "*"], None),
        (["users"], "has 'users', which fits no .* has .*user, item"),
        (["*", "user"], "'user', and patterns before it fit user; .* give this one before them"),
        (["u*", "i*", ("user", "item")], "patterns before it fit user, item"),
    ],
)
@pytest.mark.parametrize("option", ["groups", "tables"])
def test_pattern_that_counts_for_no_name_is_an_error(
    option: str, patterns: list[str], text: str | None
) -> None:
    each = {"l2": 0.5} if option == "groups" else Table()
    given: Any = {option: dict.fromkeys(patterns, each)}
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        assert recommender_job(**given).variables()


def test_table_and_variable_of_one_name_are_an_error() -> None:
    class Both(Recommender):
        def parameters(self, seed: int) -> dict[str, Any]:
            return {"user": np.zeros(1, np.float32)}

    with pytest.raises(ConfigError, match="a table and a variable called 'user'"):
        recommender_job(Both()).variables()


@pytest.mark.parametrize(
    "other",
    [
        {"tables": {"user": Table(optimizer=SGD(0.1))}},
        {"tables": {"item": Table(rows=100)}},
        {"tables": {"*": Table(initial=Normal(0.1))}},
        {"tables": {"user": Table(admit_after=2)}},
    ],
)
def test_jobs_whose_tables_differ_have_other_fingerprints(other: dict[str, Any]) -> None:
    assert job_fingerprint(recommender_job()) != job_fingerprint(recommender_job(**other))
    assert job_fingerprint(recommender_job(**other)) == job_fingerprint(recommender_job(**other))


def test_empty_logdir_is_none() -> None:
    assert job(logdir="").logdir is None
    assert job(logdir="runs").with_overrides(logdir="").logdir is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logdir": "s3://bucket/run"}, "logdir is 's3://bucket/run'.*this address as upload"),
        ({"logdir": "run", "upload": "bucket/run"}, "upload is 'bucket/run'; .*s3://bucket/net"),
        (
            {"logdir": "run", "upload": "s3://bucket/run", "inner_state": "keep"},
            "inner_state is 'keep'; .*not uploaded",
        ),
    ],
)
def test_addresses_of_checkpoints_that_cannot_be_right_are_refused(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        job(**options)


def test_model_whose_variables_change_their_names_is_refused() -> None:
    class Counting(Handmade):
        calls = 0

        def parameters(self, seed: int) -> Any:
            self.calls += 1
            return {f"w{self.calls}": np.zeros(3, np.float32)}

    with pytest.raises(ConfigError, match=r"has w\d, .* in one call .* expected the same names"):
        job(model=Counting()).initial_values()
