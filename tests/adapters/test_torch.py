"""A torch module as a model: where its gradients lie, what counts, what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters import step as steps  # noqa: E402
from tests.adapters.frameworks import Torch  # noqa: E402
from tests.adapters.step import BATCH, X, Y, same  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.torch import TorchModel, load_state_dict  # noqa: E402
from zmqtrain.compute import threads  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, DataError  # noqa: E402
from zmqtrain.metrics import Accuracy  # noqa: E402
from zmqtrain.models.base import Buffers  # noqa: E402
from zmqtrain.optim import SGD, AdamW, Momentum  # noqa: E402
from zmqtrain.optim.clipping import global_norm  # noqa: E402

net = Torch().net


class Net(nn.Module):
    """Has tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.fixed = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) * self.fixed


class Counting(nn.Module):
    """Has buffers of several kinds, and replaces one of them in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("level", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Any) -> Any:
        if self.training:
            self.calls = self.calls + 1
            self.level += 0.5
        return self.line(x)


class Step(steps.Step):
    def __init__(self, build: Any = net, loss: Any = F.cross_entropy, **options: Any) -> None:
        super().__init__(TorchModel(build, loss, **options))


def test_step_in_float64_has_a_more_precise_loss() -> None:
    step = Step()
    doubles = {name: value.astype(np.float64) for name, value in step.parameters.items()}
    out = {name: np.empty_like(value) for name, value in doubles.items()}
    precise = step.model.loss_and_gradients(doubles, BATCH, out)
    assert precise == pytest.approx(step(), rel=1e-6)
    assert precise != float(np.float32(precise))


def test_gradient_that_autograd_has_replaced_is_copied() -> None:
    def forgetful(module: Any, batch: Any) -> Any:
        module.zero_grad(set_to_none=True)
        return F.cross_entropy(module(batch[0]), batch[1])

    plain, replaced = Step(), Step(loss=None, training_step=forgetful)
    for _ in range(2):
        assert plain() == replaced()
        same(replaced.gradients(), plain.gradients())


def test_gradients_of_a_loop_of_ones_own_are_not_sent_while_it_may_change_them() -> None:
    step, written = Step(), []  # type: ignore[var-annotated]
    step.out = Buffers(step.out, lambda values, names: written.extend(names))
    model = step.model
    features, labels = model.begin(step.values, BATCH, step.out)
    loss = F.cross_entropy(model.module(features), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.module.parameters(), 1e-3)
    model.finish(loss)
    assert written == []
    assert global_norm(step.gradients()) == pytest.approx(1e-3, rel=1e-2)


def test_job_with_overlap_gets_each_gradient_once_it_is_complete() -> None:
    step, written = Step(micro_batches=3), {}
    step()
    expected = step.gradients()

    def on_written(values: Any, names: Any) -> None:
        written.update({name: values[name].copy() for name in names if name not in written})

    first = step.out = Buffers(step.out, on_written)
    for _ in range(2):
        written.clear()
        step()
        same(written, expected)
    step.out = Buffers({name: value.copy() for name, value in first.items()}, on_written)
    for value in first.values():
        value[...] = 77  # memory that the module has left is not written to
    written.clear()
    step()
    same(written, expected)
    assert all((value == 77).all() for value in first.values())


def test_tied_parameters_are_one_variable_and_frozen_ones_none() -> None:
    step = Step(Net)
    assert sorted(step.parameters) == ["first.bias", "first.weight", "idle", "second.bias"]
    same(step.frozen, {"fixed": np.full(5, 2.0)})


def test_buffers_are_state_that_a_step_reads_and_renews() -> None:
    step = Step(Counting)
    step.values["calls"][...] = 7
    for _ in range(2):
        step()
        assert (step.out["calls"].item(), step.out["calls"].dtype) == (8, np.int64)
        assert step.out["level"].tolist() == [0.5, 0.5]
    assert "cache" not in step.values


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_appears_later_is_refused_if_it_is_state(persistent: bool) -> None:
    class Late(nn.Linear):
        def forward(self, x: Any) -> Any:
            self.register_buffer("seen", torch.zeros(1), persistent=persistent)
            return super().forward(x)

    step = Step(lambda: Late(5, 3))
    if persistent:
        with pytest.raises(ConfigError, match="appears later: seen"):
            step()
    else:
        assert np.isfinite(step())


def test_module_that_rests_in_steps_does_so_after_an_evaluation() -> None:
    step = Step(lambda: net(nn.BatchNorm1d(4).eval()))
    step()
    step.model.metrics(step.values, BATCH)
    step.model.predict(step.values, BATCH)
    assert step.out["2.num_batches_tracked"] == 0
    assert [module.training for module in step.model.module] == [True, True, False, True]


def test_module_is_built_once_for_parameters_state_and_steps() -> None:
    built = []

    def build() -> Any:
        built.append(Counting())
        return built[-1]

    step = Step(build)
    step()
    step.model.metrics(step.values, BATCH)
    step()
    assert len(built) == 1


def test_initial_values_leave_the_module_of_the_steps() -> None:
    step = Step()
    step()
    module = step.model.module
    same(step.model.parameters(0), TorchModel(net, F.cross_entropy).parameters(0))
    assert step.model.module is module


def test_own_loop_without_backward_is_refused() -> None:
    values = (model := TorchModel(net, F.cross_entropy)).parameters(0)
    model.begin(values, BATCH, {name: np.empty_like(value) for name, value in values.items()})
    with pytest.raises(ConfigError, match=r"loss\.backward\(\)"):
        model.finish(1.0)


def test_own_loop_trains_the_module_that_it_was_given() -> None:
    data = Arrays(train=BATCH, evaluation=BATCH)

    def job() -> Job:
        model = TorchModel(lambda: net(nn.Dropout(0.1)), F.cross_entropy)
        options: dict[str, Any] = {"seed": 3, "batch_size": 5, "steps": 20, "evaluate_every": 5}
        return Job(model=model, data=data, optimizer=Momentum(0.1), **options)

    with zmqtrain.attach(job()) as session:
        module = session.module
        for x, y in session.batches():
            module.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            session.step(loss)
    assert session.summary is not None
    assert session.summary.parameters_sha256 == zmqtrain.run(job()).parameters_sha256
    assert module is session.module


def test_compiled_module_gives_the_same_gradient() -> None:
    plain, compiled = Step(), Step(compile={"backend": "eager"})
    for _ in range(2):
        assert compiled() == pytest.approx(plain())
        same(compiled.gradients(), plain.gradients(), 1e-6)


@dataclass
class Output:
    """Result of a model, like that of Hugging Face's models."""

    logits: Any
    loss: Any = None


class Named(nn.Linear):
    """Returns its outputs as ``wrap`` makes them, and takes a mask."""

    def __init__(self, wrap: Any) -> None:
        super().__init__(5, 3)
        self.wrap = wrap

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.wrap(super().forward(x if mask is None else x * mask))


def predicted(wrap: Any, batch: Any, **options: Any) -> Any:
    model = TorchModel(lambda: Named(wrap), training_step=lambda module, batch: 0, **options)
    values = model.parameters(0)
    return model.predict(values, batch), X @ values["weight"].T + values["bias"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"scores": out},
        lambda out: {"hidden": out * 2, "logits": out},
        Output,
        lambda out: Output(out, loss=out.sum()),
    ],
)
def test_outputs_by_name_are_predicted_by_their_logits_or_their_only_tensor(wrap: Any) -> None:
    found, expected = predicted(wrap, BATCH)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


def test_predict_of_the_user_calls_the_module_with_several_inputs() -> None:
    def predict(module: Any, batch: Any) -> Any:
        return module(batch[0], mask=batch[1]).logits

    found, expected = predicted(Output, (X * 2, np.full_like(X, 0.5), Y), predict=predict)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("wrap", "batch", "options", "told"),
    [
        (lambda out: {"a": out, "b": out}, BATCH, {}, "predicts a dict with a, b; expected"),
        (str, BATCH, {}, "expected a tensor, a tuple of tensors, or logits"),
        (Output, (X, X, Y), {}, "has 3 arrays, and only its training_step knows"),
        (Output, (X, X), {"labels_at": 2}, "has 2 arrays, and only its training_step knows"),
        (Output, BATCH, {"predict": lambda *_: None}, "predicts None; expected a tensor"),
    ],
)
def test_outputs_that_nothing_names_are_refused(
    wrap: Any, batch: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        predicted(wrap, batch, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_come_home_by_a_distributed_checkpoint(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    options: Any = {"data": Arrays((X, X)), "optimizer": AdamW(0.1), "batch_size": 4, "steps": 3}
    model, logdir, directory = TorchModel(Net, F.mse_loss), str(tmp_path / "run"), tmp_path / "dcp"
    trained = zmqtrain.run(Job(model=model, logdir=logdir, **options)).parameters
    module = Net()
    load_state_dict(module, logdir)
    checkpoint.save(module.state_dict(), checkpoint_id=directory, no_dist=True)
    weights = Net().state_dict()
    checkpoint.load(weights, checkpoint_id=directory, no_dist=True)
    same(Job(model=TorchModel(Net, F.mse_loss), initial=weights, **options).all_values(), trained)


def test_metrics_of_a_training_step_measure_all_of_an_evaluation() -> None:
    step = Step(
        loss=None,
        training_step=lambda module, batch: module(batch[0]).square().mean(),
        metrics=lambda module, batch: {"size": module(batch[0]).abs().mean()},
    )
    assert step.model.metrics(step.values, BATCH).keys() == {"size"}


def test_copy_has_a_module_of_its_own() -> None:
    step = Step()
    step()
    twin = copy.deepcopy(step.model)
    assert twin.module is not step.model.module
    assert repr(twin) == repr(step.model) == "TorchModel(Torch.net)"
    module = net()
    shared = TorchModel(lambda: module, F.cross_entropy)
    assert shared.module is module and copy.deepcopy(shared).module is not module


def test_batches_of_float64_are_computed_in_float32() -> None:
    assert Step()((X.astype(np.float64), Y)) == Step()((X, Y))
    with pytest.raises(DataError, match=r"a batch holds 1e\+300, which is infinite as float32"):
        Step()((np.full_like(X, 1e300, np.float64), Y))


def test_weights_of_examples_need_a_loss_that_is_a_plain_mean() -> None:
    with pytest.raises(ConfigError, match="weights"):
        Step(loss=nn.CrossEntropyLoss(torch.ones(3)))((X, Y, np.ones(len(Y), np.float32)))


def test_third_argument_of_a_loss_is_no_weight() -> None:
    """The variance of GaussianNLLLoss, here of one output."""
    values, ones = X[:, :1], np.ones(len(X), np.float32)
    step = Step(lambda: nn.Sequential(nn.Linear(X.shape[1], 1)), loss=nn.GaussianNLLLoss())
    assert np.isfinite(step((X, values, ones)))


def test_threads_of_the_task_are_those_of_the_thread_that_computes() -> None:
    def computed() -> int:
        found: list[int] = []
        step = Step(
            loss=None,
            training_step=lambda module, batch: (
                found.append(torch.get_num_threads()) or module(batch[0]).mean()
            ),
        )
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return found[0]

    before = torch.get_num_threads()
    try:
        for number in (3, 1):
            threads.limit_threads(number)
            assert computed() == number
    finally:
        threads.limit_threads(before)
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"training_step": print}, "both loss.* and training_step"),
        ({"autocast": torch.float16}, "autocast"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": 2.0}, "micro_batches"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, 'adds up.*reduction="mean"'),
        ({"loss": partial(F.cross_entropy, reduction="sum")}, 'adds up.*reduction="mean"'),
        ({"build": lambda: None}, "expected a torch.nn.Module"),
        ({"build": lambda: net().double()}, "float32, torch.complex64, .*: build it in float32"),
        ({"build": 3}, "build is 3; expected a function"),
        ({"build": lambda width: net()}, r"\(width\) is called with \(\): .*'width'; .*build\(\)"),
        ({"build": lambda: 1 / 0}, r"^build\(\) of .* failed: .*ZeroDivisionError"),
        ({"build": lambda: nn.LazyLinear(3)}, r"lazy layers, .*: weight, bias; .*batch of zeros"),
        ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss; .*nn\.CrossEntropyLoss\(\)$"),
        ({"loss": "mse_loss"}, r"the loss is 'mse_loss'; .*torch\.nn\.functional\.mse_loss$"),
    ],
)
def test_model_that_cannot_be_trained_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TorchModel(**{"build": net, "loss": F.cross_entropy} | options).parameters(0)


def test_sparse_gradient_of_what_is_no_table_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(9, 3))

        def forward(self, x: Any) -> Any:
            return F.embedding(x, self.rows, sparse=True)

    with pytest.raises(ConfigError, match="or name it in the job's tables"):
        Step(Own)((Y, Y))


def test_import_of_zmqtrain_imports_no_framework() -> None:
    code = (
        "import sys, zmqtrain, zmqtrain.adapters; zmqtrain.Job, zmqtrain.run, zmqtrain.load; "
        "import zmqtrain.models, zmqtrain.data, zmqtrain.roles.launch, zmqtrain.cli.main; "
        "sys.exit(bool({'cupy', 'torch', 'jax', 'keras'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_module_on_a_gpu_shares_the_memory_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    host, step = Step(), Step()
    host()
    step.values = {name: cupy.asarray(value) for name, value in step.values.items()}
    step.out = {name: cupy.empty_like(value) for name, value in step.values.items()}
    for _ in range(2):
        step(tuple(cupy.asarray(array) for array in BATCH))
        for name, parameter in step.model.module.named_parameters():
            assert parameter.data_ptr() == step.values[name].data.ptr
            assert parameter.grad.data_ptr() == step.out[name].data.ptr
    same({name: cupy.asnumpy(step.out[name]) for name in step.parameters}, host.gradients(), 1e-4)


def shares(outputs: Any, labels: Any) -> dict[str, Any]:
    return {"first": (outputs.argmax(1) == 0).float().mean()}


def step_of(module: Any, batch: Any) -> dict[str, Any]:
    outputs = module(batch[0])
    return {"loss": F.cross_entropy(outputs, batch[1]), **shares(outputs, batch[1])}


@pytest.mark.parametrize(
    "options",
    [
        {"loss": F.cross_entropy, "metrics": shares},
        {"loss": F.cross_entropy, "metrics": shares, "micro_batches": 3},
        {"training_step": step_of},
    ],
    ids=["loss", "micro-batches", "step"],
)
@pytest.mark.parametrize("class_weight", [None, {0: 2.0}])
def test_measures_of_a_step_are_of_the_outputs_before_its_update(
    options: dict[str, Any], class_weight: Any
) -> None:
    module = build_measured()
    outputs = module(torch.from_numpy(X))
    first = (outputs.argmax(1) == 0).float().mean().item()
    trainer = zmqtrain.Trainer(TorchModel(build_measured, **options), SGD(0.1))
    fields = {"batch_size": len(X), "class_weight": class_weight, "verbose": False}
    history = trainer.fit(X, Y, validation_data=(X, Y), **fields).history
    assert history["first"] == [pytest.approx(first)]
    assert set(history) == {"loss", "first", "val_loss", "val_first"}


def first_logit(outputs: Any, labels: Any) -> Any:
    return F.binary_cross_entropy_with_logits(outputs[:, 0], labels.float())


def mean_of_two(outputs: Any, labels: Any, lengths: Any) -> Any:
    return outputs.square().mean() + labels.float().mean() + lengths.float().mean()


@pytest.mark.parametrize(
    ("options", "width", "targets", "is_measured"),
    [
        ({"loss": F.cross_entropy}, 3, (Y,), True),
        ({"loss": F.cross_entropy}, 3, (Y, np.ones(12, np.float32)), True),
        ({"loss": F.cross_entropy}, 3, (np.where(Y == 2, -100, Y),), False),
        ({"loss": first_logit}, 1, (Y % 2,), False),
        ({"loss": mean_of_two}, 3, (Y, Y), False),
        ({"loss": mean_of_two, "labels_at": 2}, 3, (Y + 5, Y), True),
    ],
)
def test_accuracy_of_steps_and_evaluations_follows_from_the_loss(
    options: dict[str, Any], width: int, targets: Any, is_measured: bool
) -> None:
    trainer = zmqtrain.Trainer(TorchModel(lambda: nn.Linear(5, width), **options), SGD(0.1))
    measures = trainer.evaluate((X, *targets), batch_size=5)
    if not is_measured:
        assert set(measures) == {"loss"}
        return
    labels = targets[options.get("labels_at", 1) - 1]
    outputs = trainer.predict(X)
    assert measures["accuracy"] == pytest.approx(np.mean(outputs.argmax(1) == labels))
    history = trainer.fit((X, *targets), batch_size=12, verbose=False).history
    assert history["accuracy"] == [pytest.approx(measures["accuracy"])]


def test_ignored_labels_of_one_batch_leave_no_accuracy_of_the_others() -> None:
    labels = np.where(np.arange(12) == 7, -100, Y)
    model = TorchModel(lambda: nn.Linear(5, 3), F.cross_entropy)
    trainer = zmqtrain.Trainer(model, SGD(0.1), metrics=[Accuracy(name="known", ignore_index=-100)])
    data = {"validation_data": (X, labels), "batch_size": 4, "verbose": False}
    history = trainer.fit((X, labels), **data).history
    assert set(history) == {"loss", "known", "val_loss", "val_known"}
    right = trainer.predict(X).argmax(1)[labels >= 0] == labels[labels >= 0]
    assert history["val_known"] == [pytest.approx(np.mean(right))]
    for batch_size in (4, 5, 12):
        measures = trainer.evaluate((X, labels), batch_size=batch_size)
        assert set(measures) == {"loss", "known"}
        assert measures["known"] == pytest.approx(np.mean(right))


def test_images_whose_width_is_the_number_of_classes_need_an_axis() -> None:
    images = np.random.default_rng(1).normal(size=(6, 1, 3, 3)).astype(np.float32)
    labels = np.arange(54).reshape(6, 3, 3) % 3

    def measured_by(metric: Any) -> Any:
        model = TorchModel(lambda: nn.Conv2d(1, 3, 1), F.cross_entropy)
        trainer = zmqtrain.Trainer(model, SGD(0.1), metrics=[metric])
        return trainer.evaluate((images, labels)), trainer.predict(images)

    with pytest.raises(ConfigError, match="axis=1"):
        measured_by(Accuracy())
    measures, outputs = measured_by(Accuracy(axis=1))
    assert measures["accuracy"] == pytest.approx(np.mean(outputs.argmax(1) == labels))


def build_measured() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Linear(X.shape[1], 3)


class OtherWidths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.head = nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def test_error_in_a_layer_names_the_layer() -> None:
    job = Job(model=TorchModel(OtherWidths, F.cross_entropy), data=BATCH, optimizer=SGD(0.1))
    with pytest.raises(ConfigError, match=r"\(in the layer 'head', Linear\(in_features=7"):
        zmqtrain.run(job.with_overrides(batch_size=4))


class TwoInputs(nn.Linear):
    def forward(self, a: Any, b: Any) -> Any:
        return super().forward(a + b)


def column() -> Any:
    return nn.Linear(5, 1)


def row() -> Any:
    return nn.Sequential(column(), nn.Flatten(0))


@pytest.mark.parametrize(
    ("build", "loss", "batch", "text"),
    [
        (
            lambda: TwoInputs(5, 3),
            F.cross_entropy,
            (X, X, Y),
            r"TwoInputs.forward\(a, b\) .* 'b'; a batch has 3 arrays; .*training_step",
        ),
        (net, nn.CrossEntropyLoss(), (X, X, Y), r"has 3 arrays, .*labels; .*training_step="),
        (column, None, BATCH, r"forward\(input\) .* 2 arrays; .*TorchModel\(build, loss\)$"),
        (net, F.cross_entropy, (X,), "'target'; a batch has one array; expected inputs and tar"),
        (net, nn.CrossEntropyLoss(), (X,), "'target'; a batch has one array; expected inputs"),
        (net, F.mse_loss, BATCH, r"shape \(12,\), outputs \(12, 3\); .*y.reshape\(-1, 1\)"),
        (column, nn.HuberLoss(), (X, X[:, 0]), r"shape \(12,\), outputs \(12, 1\)"),
        (row, partial(F.l1_loss), (X, X[:, :1]), r"shape \(12, 1\), outputs \(12,\)"),
    ],
)
def test_data_that_does_not_fit_the_model_or_its_loss_is_named(
    build: Any, loss: Any, batch: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Step(build, loss)(batch)


def test_inputs_of_a_prediction_are_named() -> None:
    step = Step(lambda: TwoInputs(5, 3), None, training_step=lambda module, batch: None)
    with pytest.raises(ConfigError, match=r"TwoInputs.forward\(a, b\) .*; give .*predict="):
        step.model.predict(step.values, (X,))


@pytest.mark.parametrize(("build", "target"), [(column, X[:, :1]), (row, X[:, 0])])
def test_targets_of_the_shape_of_the_outputs_are_taken(build: Any, target: Any) -> None:
    step = Step(build, F.mse_loss)
    outputs = step.model.predict(step.values, (X,))
    assert step((X, target)) == pytest.approx(float(np.mean((outputs - target) ** 2)), rel=1e-5)
