"""Batches of every form give the training of PyTorch's own loop, however tasks share a step.

The model predicts tokens; the loss is the mean over the tokens that have a label, so batches have
uneven weights, and one may have none.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Arrays, Cached, Mapped, Parallel, Stream, TorchDataset
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.metrics import Accuracy
from zmqtrain.models import MLP
from zmqtrain.models.gradient_check import mistakes_of_a_step
from zmqtrain.models.weights import EMPTY
from zmqtrain.optim import SGD, Update
from zmqtrain.optim.mean import Assign, Mean

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from zmqtrain.adapters.torch import TorchModel  # noqa: E402

STEPS, WHOLE, TOKENS = 5, 12, 7
RANDOM = np.random.default_rng(3)
LENGTHS = [int(n) for n in RANDOM.integers(1, 9, 30)]
IDS = [torch.tensor(RANDOM.integers(0, TOKENS, n)) for n in LENGTHS]
LABELS = [(ids * 3 + 1) % TOKENS for ids in IDS]
for number, labels in enumerate(LABELS):
    labels[number % 3 :: 3] = -100
    labels[: number % 4 // 3 * 9] = -100  # a quarter of the examples has none


class Examples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": IDS[index], "labels": LABELS[index]}


@dataclass
class Output:
    loss: Any
    logits: Any


class Net(nn.Module):
    """Model that is called like those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        scores = self.outer(self.inner(input_ids))
        if labels is None:
            return scores
        return Output(F.cross_entropy(scores.flatten(0, -2), labels.flatten()), scores)


@dataclass
class Graph:
    """Batch of a class that is no tree."""

    nodes: Any
    labels: Any


def padded(rows: list[Any]) -> dict[str, Any]:
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(labels, True, -100)}


def encoded(rows: list[Any]) -> Any:
    """Return a mapping that is no dict, like Hugging Face's BatchEncoding."""
    return UserDict(padded(rows))


def pair(rows: list[Any]) -> Any:
    batch = padded(rows)
    return batch["input_ids"], batch["labels"]


def ragged(rows: list[Any]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in ("input_ids", "labels")}


def graph(rows: list[Any]) -> Graph:
    return Graph(*(torch.cat(part) for part in ragged(rows).values()))


def by_tokens(scores: Any, labels: Any) -> Any:
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


def mean_of_each(module: Any, batch: Any) -> Any:
    return sum(module(**row).loss.nan_to_num() * counted(row) for row in batch) / counted(batch)


def counted(batch: Any) -> Any:
    """Return the number of tokens that have a label, in any of these batches."""
    if isinstance(batch, list):
        return sum(map(counted, batch))
    labels = batch.labels if isinstance(batch, Graph) else batch["labels"]
    return sum(map(counted, map(wrapped, labels))) if isinstance(labels, list) else valid(labels)


def valid(labels: Any) -> int:
    return int((labels != -100).sum())


def wrapped(labels: Any) -> dict[str, Any]:
    return {"labels": labels}


class Transposed(nn.Module):
    """Has the classes second, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, ids: Any) -> Any:
        return self.net(ids).transpose(1, 2)


def whole(module: Any, batch: Any) -> Any:
    parts = zip(batch["input_ids"], batch["labels"], strict=True)
    return mean_of_each(module, [{"input_ids": ids, "labels": labels} for ids, labels in parts])


def token_model(build: Any, loss: Any = None, **options: Any) -> Any:
    return lambda **more: TorchModel(build, loss, **options, **more)


FORMS: dict[str, tuple[Any, Any]] = {
    "dict, the module has the loss": (padded, token_model(Net, weight=counted)),
    "a mapping": (encoded, token_model(Net, weight=counted)),
    "dict and a loss": (padded, token_model(Net, lambda scores, b: scores.loss, weight=counted)),
    "tuple, known loss": (pair, token_model(Transposed, nn.CrossEntropyLoss())),
    "tuple, known function": (pair, token_model(Transposed, F.cross_entropy)),
    "tuple, own loss": (pair, token_model(Net, by_tokens, weight=lambda batch: valid(batch[1]))),
    "lists in a dict": (ragged, token_model(Net, training_step=whole, weight=counted)),
    "list of dicts": (list, token_model(Net, training_step=mean_of_each, weight=counted)),
    "object": (
        graph,
        token_model(Net, training_step=lambda m, b: m(b.nodes, b.labels).loss, weight=counted),
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "ps": {"workers": 2, "exchange": "direct"},
    "board": {"workers": 2, "exchange": "board"},
    "no ps": {"workers": 2, "ps": 0},
    "board without ps": {"workers": 3, "ps": 0, "exchange": "board"},
    "a sum in this process": {"aggregate": 4},
    "a sum on a ps": {"workers": 1, "aggregate": 4},
    "devices": {"devices": "cpu:0,cpu:1", "workers": 1},
    "micro-batches": {"micro_batches": 3, "workers": 1},
}


def trained(form: str, **way: Any) -> Any:
    """Train in one process, or in this way; return the summary."""
    collate, make = FORMS[form]
    model = make(**({"micro_batches": way.pop("micro_batches")} if "micro_batches" in way else {}))
    run = {name: way.pop(name) for name in ("workers", "ps") if name in way}
    aggregate = way.pop("aggregate", None)
    parts = aggregate or run.get("workers", 1) * (2 if "devices" in way else 1)
    policy = "sync-replicas" + (f":aggregate={aggregate}" if aggregate else "")
    data = TorchDataset(Examples(), collate_fn=collate)
    options = {"steps": STEPS, "policy": policy, "batch_size": WHOLE // parts} | way
    job = Job(model=model, data=Arrays(data, data), optimizer=SGD(0.5), **options)
    return zmqtrain.run(job, **run)


def token_job(model: Any) -> Job:
    data = TorchDataset(Examples(), collate_fn=padded)
    fields = {"steps": STEPS, "policy": "sync-replicas", "batch_size": WHOLE}
    return Job(model=model, data=Arrays(data, data), optimizer=SGD(0.5), **fields)


def reference(steps: int = STEPS) -> dict[str, Any]:
    """Train in PyTorch's own loop, on the tokens of all tasks at once."""
    from zmqtrain.data.batches import BatchPlan

    torch.manual_seed(0)
    net, plan = Net(), BatchPlan(len(IDS), WHOLE, 0)
    rule = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(steps):
        rule.zero_grad()
        net(**padded([Examples()[index] for index in plan.indices(step)])).loss.backward()
        rule.step()
    every = padded(list(Examples()))
    return {
        **{name: value.detach().numpy() for name, value in net.named_parameters()},
        "loss": float(net(**every).loss.detach()),
    }


def assert_like_torch(summary: Any) -> None:
    assert summary.exit_code == 0
    expected = reference()
    assert summary.measures["loss"] == pytest.approx(expected.pop("loss"), rel=1e-5)
    for name, value in expected.items():
        found = next(v for n, v in summary.parameters.items() if n.endswith(name))
        np.testing.assert_allclose(found, value, 0, 1e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_form_train_as_in_the_frameworks_own_loop(form: str) -> None:
    assert_like_torch(trained(form))
    assert_like_torch(trained(form, **WAYS["ps"]))


@pytest.mark.parametrize("way", WAYS)
def test_mean_over_tokens_does_not_depend_on_how_tasks_share_a_step(way: str) -> None:
    assert_like_torch(trained("dict, the module has the loss", **WAYS[way]))
    assert_like_torch(trained("tuple, known loss", **WAYS[way]))


def test_mapping_is_cut_into_micro_batches_as_a_dict_is() -> None:
    assert_like_torch(trained("a mapping", **WAYS["micro-batches"]))


def test_own_loop_gets_batches_of_any_form() -> None:
    job, losses = token_job(TorchModel(Net, weight=counted)), []
    with zmqtrain.attach(job) as session:
        for batch in session.batches():
            loss = session.module(**batch).loss
            loss.backward()
            session.step(loss)
            losses.append(float(loss.detach()))
    assert len(losses) == STEPS
    assert_like_torch(session.summary)


class Quiet(Net):
    """All its losses are close to that of chance, as those of a new language model."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.outer.weight *= 0.003
            self.outer.bias *= 0.003


def test_unknown_weight_is_told_and_refused_where_parts_would_be_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zmqtrain.run(token_job(TorchModel(Quiet)))
    (warning,) = [record.message for record in caplog.records]
    assert "batches of TorchModel(Quiet) have labels of -100" in warning
    with pytest.raises(ConfigError, match=r"not a mean over examples.*give weight="):
        zmqtrain.run(token_job(TorchModel(Quiet, micro_batches=3)).with_overrides(steps=1))


def test_pytree_of_jax_trains_alike_on_any_number_of_workers() -> None:
    jax = pytest.importorskip("jax")
    from zmqtrain.adapters.jax import JaxModel

    def losses(weights: Any, batch: Any) -> Any:
        scores = jax.nn.log_softmax(weights["table"][batch["input_ids"]])
        labels = batch["labels"]
        each = -jax.numpy.take_along_axis(scores, labels[..., None].clip(0), -1)[..., 0]
        return each, labels != -100

    def loss(weights: Any, batch: Any, key: Any) -> Any:
        each, is_counted = losses(weights, batch)
        return (each * is_counted).sum() / is_counted.sum()  # NaN without labels

    def init(key: Any) -> Any:
        return {"table": jax.random.normal(key, (TOKENS, TOKENS))}

    model = JaxModel(init, loss, weight=lambda batch: (batch["labels"] != -100).sum())
    data = TorchDataset(Examples(), collate_fn=padded)
    fields = {"data": Arrays(data, data), "steps": STEPS, "policy": "sync-replicas"}
    runs = [
        zmqtrain.run(Job(model=model, optimizer=SGD(0.5), batch_size=12 // n, **fields), workers=n)
        for n in (1, 3)
    ]
    alone, together = (summary.parameters["table"] for summary in runs)
    np.testing.assert_allclose(together, alone, 0, 1e-6)
    assert runs[1].measures["loss"] == pytest.approx(runs[0].measures["loss"], rel=1e-5)


@pytest.mark.parametrize("way", ["one process", "ps", "board"])
def test_batch_without_labels_counts_nothing(way: str) -> None:
    """Also where a step has no other one: its gradient is 0, and its state counts."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.outer = nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 3)

        def forward(self, x: Any) -> Any:
            return self.outer(self.norm(x))

    x = np.tile(np.float32([[2, 7]]), (8, 1))
    data = x, np.full(8, -100)
    model = TorchModel(Normed, nn.CrossEntropyLoss())
    fields = {"policy": "sync-replicas", "batch_size": 2, "steps": 2, "optimizer": SGD(1.0)}
    run = dict(WAYS.get(way, {}))
    job = Job(model=model, data=Arrays(data, data), exchange=run.pop("exchange", "auto"), **fields)
    summary = zmqtrain.run(job, **run)
    before = model.parameters(0)
    for name, value in before.items():
        np.testing.assert_array_equal(summary.parameters[name], value)
    np.testing.assert_allclose(summary.parameters["norm.running_mean"], [2, 7])
    assert (summary.train_loss, summary.measures["loss"]) == (0, 0)


def test_accuracy_counts_examples_where_the_loss_weighs_classes() -> None:
    x, y = np.zeros((10, 2), np.float32), np.array([0] * 7 + [1] * 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 99.0]))
    model = TorchModel(lambda: nn.Linear(2, 2), loss)
    found = zmqtrain.Trainer(model, SGD(0.1)).evaluate((x, y), batch_size=4)
    torch.manual_seed(0)
    outputs = nn.Linear(2, 2)(torch.tensor(x)).detach()
    right = float((outputs.argmax(1).numpy() == y).mean())
    expected = {"loss": float(loss(outputs, torch.tensor(y))), "accuracy": right}
    assert found == pytest.approx(expected, rel=1e-5)


def tokens(rows: Any) -> Any:
    return TorchDataset(Examples(), collate_fn=rows)


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (Parallel(tokens(padded), 2), {}, "Parallel joins rows: give TorchDataset num_workers"),
        (Cached(tokens(padded)), {}, "Cached keeps rows: leave it out"),
        (Mapped(tokens(padded), len), {}, "Mapped transforms rows"),
        (
            tokens(padded),
            {"class_weight": {0: 2.0}},
            "is a dict of 'input_ids', 'labels'; expected",
        ),
        (tokens(list), {"devices": "cpu:0,cpu:1"}, r"batch\[0\]\['input_ids'\] is of shape"),
        (tokens(graph), {"devices": "cpu:0,cpu:1"}, "batch is a Graph; expected a row for each of"),
        (tokens(lambda rows: rows[0]["labels"]), {}, "expected 4 rows in each array"),
        (tokens(len), {}, "expected a tuple of arrays or tensors with a row for each example"),
        (tokens(lambda rows: [row["labels"] for row in rows]), {}, "for a batch of another kind"),
    ],
)
def test_batch_that_cannot_be_used_so_is_refused_with_the_way_out(
    data: Any, options: dict[str, Any], text: str
) -> None:
    model = TorchModel(Net, training_step=mean_of_each, weight=counted)
    with pytest.raises((ConfigError, DataError), match=text):
        zmqtrain.run(
            Job(model=model, data=data, optimizer=SGD(0.1), steps=1, batch_size=4, **options)
        )


@pytest.mark.parametrize("form", ["dict, the module has the loss", "object"])
def test_step_of_any_batch_is_checked_before_a_job(form: str) -> None:
    collate, make = FORMS[form]
    model, batch = make(), TorchDataset(Examples(), collate_fn=collate).take(np.arange(9))
    assert list(mistakes_of_a_step(model, model.parameters(0), batch)) == []


def test_model_of_arrays_refuses_a_dict() -> None:
    job = Job(model=MLP(2, 3, 4), data=tokens(padded), optimizer=SGD(0.1), steps=1, batch_size=4)
    with pytest.raises(ConfigError, match=r"is a dict of 'input_ids', 'labels'; expected a tuple"):
        zmqtrain.run(job)


def test_metric_of_labels_is_refused_where_nothing_says_which_they_are() -> None:
    job = Job(
        model=TorchModel(Net),
        data=tokens(padded),
        optimizer=SGD(0.1),
        epochs=1,
        metrics=[Accuracy()],
    )
    with pytest.raises(ConfigError, match=r"labels, and .* is a dict of 'input_ids', 'labels'"):
        zmqtrain.run(job)


def test_arrays_by_name_are_batches_by_name() -> None:
    every = {name: value.numpy() for name, value in padded(list(Examples())).items()}
    collated = TorchDataset(Examples(), collate_fn=padded)
    found = []
    for data in every, collated:
        trainer = zmqtrain.Trainer(TorchModel(Net, weight=counted), SGD(0.5))
        history = trainer.fit(data, epochs=2, batch_size=len(IDS), validation_data=data).history
        found.append((history, trainer.predict(data).tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e17, 1e-9, None, "a"])
def test_value_that_is_no_weight_is_refused(weight: Any) -> None:
    model = TorchModel(Net, weight=lambda batch: weight)
    with pytest.raises(ConfigError, match=r"weight\(\) of TorchModel\(Net\) returned"):
        zmqtrain.run(
            Job(model=model, data=tokens(padded), optimizer=SGD(0.1), steps=1, batch_size=4)
        )


def test_stream_collates_examples_of_any_kind() -> None:
    stream = Stream(["a", "b"], lambda part: list(Examples()), collate_fn=ragged)
    batch = stream.take(np.array([0, 5, 2]))
    assert [len(ids) for ids in batch["input_ids"]] == [LENGTHS[0], LENGTHS[2], LENGTHS[1]]


def test_collator_of_hugging_face_draws_the_same_for_the_same_batch() -> None:
    datasets = pytest.importorskip("datasets")
    from zmqtrain.data import HuggingFace

    rows = datasets.Dataset.from_dict({"input_ids": [i.tolist() for i in IDS], "text": ["a"] * 30})

    def masked(rows: list[Any]) -> Any:
        assert list(rows[0]) == ["input_ids"]
        ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True)
        return {"input_ids": ids, "labels": ids * (torch.rand(ids.shape) < 0.5)}

    data, indices = HuggingFace(rows, "input_ids", collator=masked), np.arange(9)
    first, again = (data.take_seeded(indices, 1, indices * 0)["labels"] for _ in range(2))
    other = data.take_seeded(indices, 1, indices * 0 + 1)["labels"]
    assert torch.equal(first, again) and not torch.equal(first, other)


@settings(max_examples=50)
@given(
    weights=st.lists(st.one_of(st.just(EMPTY), st.floats(1e-6, 1e9)), min_size=1, max_size=9),
    cut=st.integers(0, 9),
)
def test_mean_of_means_with_their_weights_is_the_mean_of_all(weights: Any, cut: int) -> None:
    gradients = [np.float32([number - 4.0, 1.0]) for number in range(len(weights))]

    def mean(count: slice) -> Any:
        shard = np.zeros(2, np.float32)
        update = Update(Assign(), fused=False).bind(shard, {})
        update.apply(Mean.of(gradients[count], weights[count]), 0)
        return shard

    parts = [part for part in (slice(cut), slice(cut, None)) if weights[part]]
    whole, totals = mean(slice(None)), [sum(weights[part]) for part in parts]
    means = np.array([mean(part) for part in parts])
    expected = np.average(gradients, axis=0, weights=weights)
    np.testing.assert_allclose(np.average(means, axis=0, weights=totals), expected, 1e-5, 1e-5)
    np.testing.assert_allclose(whole, expected, 1e-5, 1e-5)
