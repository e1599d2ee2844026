"""Weights of a torch module that are tables: the same loss and gradient as those of dense ones."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters.step import same  # noqa: E402
from tests.rows import TableStep  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters import torch_tables_of  # noqa: E402
from zmqtrain.adapters.torch import TorchModel, load_state_dict  # noqa: E402
from zmqtrain.adapters.torch_tables import TableEmbedding, TableWeight  # noqa: E402
from zmqtrain.callbacks import Callback, ModelCheckpoint  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import CheckpointError, ConfigError, DataError, RunFailedError  # noqa: E402
from zmqtrain.models.gradient_check import mistakes_of_a_step  # noqa: E402
from zmqtrain.models.rows import TableReader, readers_of  # noqa: E402
from zmqtrain.models.tables import Normal, Table, Uniform  # noqa: E402
from zmqtrain.optim.kernels.look_ups import LookUps  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.integers(0, 30, (24, 6))
Y = RNG.normal(size=24).astype(np.float32)
BATCH = (X, Y)


class Net(nn.Module):
    """Looks up users, bags of items, and makes a number of both."""

    def __init__(self, look_up: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.user = nn.Embedding(30, 4, **options)
        self.items = nn.EmbeddingBag(40, 4, mode="sum", **options)
        self.head = nn.Linear(4, 1)
        self.look_up = look_up

    def forward(self, x: Any) -> Any:
        return self.head(self.look_up(self, x))[:, 0]


def both(net: Any, x: Any) -> Any:
    return net.user(x[:, 0]) + net.items(x[:, 1:])


def twice(net: Any, x: Any) -> Any:
    return net.user(x[:, 0]) * net.user(x[:, 1]) + net.user(x[:, 0]) ** 2 + net.items(x)


def by_functions(net: Any, x: Any) -> Any:
    bags = F.embedding_bag(x.flatten(), net.items.weight, torch.arange(0, x.numel(), 6))
    return bags + F.embedding(x, net.user.weight, padding_idx=-3).sum(1)


def by_offsets(net: Any, x: Any) -> Any:
    ends = torch.arange(0, x.numel() + 1, 6, dtype=torch.int32)
    weights = net.user(x[:, 0]).sum(1).repeat_interleave(6)
    mode = {"mode": "sum", "include_last_offset": True, "padding_idx": 2}
    bags = F.embedding_bag(
        x.int().flatten(), net.items.weight, ends, per_sample_weights=weights, **mode
    )
    return bags


def by_index(net: Any, x: Any) -> Any:
    return net.user.weight[x[:, 0]] + net.items(x)


def the_largest(net: Any, x: Any) -> Any:
    return F.embedding_bag(x, net.items.weight, mode="max") + net.user(x[:, 0])


def again_in_backward(net: Any, x: Any) -> Any:
    def of(ids: Any) -> Any:
        return net.user(ids).tanh()

    kept = checkpoint(of, x[:, 0], use_reentrant=False)
    return kept + checkpoint(of, x[:, 1].float().long(), use_reentrant=False) + net.items(x)


def by_frequency(net: Any, x: Any) -> Any:
    return F.embedding(x, net.user.weight, scale_grad_by_freq=True).mean(1) + net.items(x)


def in_place(net: Any, x: Any) -> Any:
    with torch.no_grad():
        mean = net.user(x[:, 0]).mul_(2).mean()
    return net.user(x[:, 0]).relu_() + net.items(x[:, 1:2]).mul_(mean)


def of_columns(net: Any, x: Any) -> Any:
    expanded = net.user(x[:, :1]).expand(-1, 2, -1).sum(1)
    return expanded + net.items(x[:, 1:2]).T.contiguous().T


def of_none(net: Any, x: Any) -> Any:
    return both(net, x) + net.user(x[:0, :2]).sum((0, 1)) + net.items(x[:0]).sum(0)


LOOK_UPS = [
    both, twice, by_functions, by_offsets, by_index, the_largest, again_in_backward, by_frequency,
    in_place, of_columns, of_none,
]  # fmt: skip


def model(look_up: Any = both, loss: Any = F.mse_loss, **options: Any) -> TorchModel:
    of_model = {n: options.pop(n) for n in ("micro_batches", "autocast") if n in options}
    return TorchModel(lambda: Net(look_up, **{"sparse": True} | options), loss, **of_model)


def dense(step: TableStep, name: str) -> tuple[dict[int, Any], Any]:
    """Return the rows of a dense gradient that are not 0."""
    gradient = step.out[name]
    return {id_: gradient[id_] for id_ in np.flatnonzero(gradient.any(1)).tolist()}, gradient


@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"micro_batches": 3}, {"autocast": torch.bfloat16}]
)
def test_tables_have_the_loss_and_gradient_of_dense_weights(
    look_up: Any, options: dict[str, Any], one_thread: None
) -> None:
    tables, plain = (
        TableStep(model(look_up, **options)),
        TableStep(model(look_up, sparse=False, **options)),
    )
    for _ in range(2):  # the second one reads ahead
        assert tables(BATCH) == plain(BATCH)
        for name, rows in tables.rows().items():
            expected, whole = dense(plain, name)
            assert expected.keys() <= rows.keys()
            # Of several parts torch adds up the sums of each.
            tolerance = 1e-6 if look_up is twice and "micro_batches" in options else 0
            for id_, row in rows.items():
                np.testing.assert_allclose(row, whole[id_], tolerance, tolerance, err_msg=name)
        np.testing.assert_array_equal(tables.out["head.weight"], plain.out["head.weight"])
    assert tables.evaluate(BATCH) == plain.evaluate(BATCH)
    assert tables.parameters.keys() == {"head.weight", "head.bias"}


def test_bags_of_one_row_add_up_in_the_order_of_the_batch(one_thread: None) -> None:
    def by_bags(net: Any, x: Any) -> Any:
        return net.items(x[:, :1]) + net.items(x[:, 1:2]).tanh()

    def by_rows(net: Any, x: Any) -> Any:
        return (
            F.embedding(x[:, 0], net.items.weight) + F.embedding(x[:, 1], net.items.weight).tanh()
        )

    tables, plain = TableStep(model(by_bags)), TableStep(model(by_rows, sparse=False))
    assert tables(BATCH) == plain(BATCH)
    for id_, row in tables.rows()["items.weight"].items():
        np.testing.assert_array_equal(row, plain.out["items.weight"][id_])


@pytest.mark.parametrize("look_up", [both, by_functions])
def test_gradients_of_several_backward_passes_add_up(look_up: Any) -> None:
    def halves(net: Any, batch: Any) -> Any:
        loss = F.mse_loss(net(batch[0]), batch[1])
        (loss * 0.25).backward(retain_graph=True)
        (loss * 0.25).backward(retain_graph=True)
        return loss * 0.5

    once, several = (
        TableStep(TorchModel(lambda: Net(look_up, sparse=True), training_step=step))
        for step in (lambda net, batch: F.mse_loss(net(batch[0]), batch[1]), halves)
    )
    once(BATCH), several(BATCH)
    for name, rows in once.rows().items():
        assert rows.keys() == several.rows()[name].keys()
        for id_, row in rows.items():
            np.testing.assert_allclose(several.rows()[name][id_], row, 1e-5, 1e-7)


def test_row_of_padding_gets_no_gradient() -> None:
    step = TableStep(model(padding_idx=int(X[0, 0])))
    step(BATCH)
    assert int(X[0, 0]) not in step.rows()["user.weight"]
    assert {*step.rows()["user.weight"]} == {*X[:, 0].tolist()} - {int(X[0, 0])}


def test_all_tables_are_read_in_one_request_once_their_ids_are_known() -> None:
    step = TableStep(model(twice))
    users, items = np.unique(X[:, :2]).tolist(), np.unique(X).tolist()
    step(BATCH)
    assert len(step.source.requests) > 1
    step.source.requests.clear()
    step(BATCH)
    assert step.source.requests == [{"user.weight": users, "items.weight": items}]
    step.source.requests.clear()
    step((X[:5], Y[:5]))
    step.evaluate((X[:5], Y[:5]))
    of_part = np.unique(X[:5, :2]).tolist(), np.unique(X[:5]).tolist()
    assert step.source.requests == 2 * [dict(zip(step.tables, of_part, strict=True))]


@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_batch_that_was_read_ahead_has_the_same_step(look_up: Any, one_thread: None) -> None:
    ahead, plain = TableStep(model(look_up)), TableStep(model(look_up))
    other = (X[::-1].copy(), Y)
    for batch in (BATCH, other, BATCH):
        ahead.model.look_ahead(other)  # not always the next one
        ahead.model.look_ahead(batch)
        assert ahead(batch) == plain(batch)
        assert ahead.evaluate(batch) == plain.evaluate(batch)
        for name, rows in ahead.rows().items():
            for id_, row in rows.items():
                np.testing.assert_array_equal(row, plain.rows()[name][id_])


def test_ids_that_were_read_ahead_are_not_sorted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_columns = []

    def counting(columns: Any) -> LookUps:
        sorted_columns.append(len(columns))
        return LookUps(columns)

    step = TableStep(model())
    step(BATCH)  # where the ids are is not known before
    monkeypatch.setattr(torch_tables_of, "LookUps", counting)
    now, later = BATCH, (X[::-1].copy(), Y)
    step.model.look_ahead(now)
    for _ in range(3):
        assert {*step.model.look_ahead(later)} == {*step.tables}
        step(now)
        now, later = later, (now[0].copy(), Y)
    assert sorted_columns == [2, 2, 2, 2]


def test_ids_that_change_after_they_were_read_ahead_are_those_of_the_step() -> None:
    step, plain = TableStep(model()), TableStep(model())
    batch = (X.copy(), Y)
    for change in (0, 1):
        step.model.look_ahead(batch)
        batch[0][:, 0] = (batch[0][:, 0] + change) % 30
        assert step(batch) == plain(batch)


def test_look_ups_that_a_step_leaves_out_have_no_gradient() -> None:
    def sometimes(net: Any, x: Any) -> Any:
        rows = net.items(x[:, 1:])
        return rows + net.user(x[:, 0]) if len(x) == len(X) else rows

    step = TableStep(model(sometimes))
    step(BATCH), step(BATCH)
    assert len(step.rows()["user.weight"]) == len(np.unique(X[:, 0]))
    step((X[1:], Y[1:]))
    assert not step.rows()["user.weight"]


def test_ids_that_nobody_foresees_are_read_at_the_call() -> None:
    ids = torch.arange(24) % 7
    step = TableStep(model(lambda net, x: net.user(ids) + net.items((x + 1) % 30)))
    plain = TableStep(model(lambda net, x: net.user(ids) + net.items((x + 1) % 30), sparse=False))
    for _ in range(2):
        assert step(BATCH) == plain(BATCH)
    assert step.source.requests[2:] == step.source.requests[:2]


def test_ids_that_a_step_changes_in_place_are_read_as_they_are_then() -> None:
    def shifted(net: Any, x: Any) -> Any:
        x.add_(1).remainder_(30)
        return net.user(x[:, 0]) + net.items(x)

    step, plain = TableStep(model(shifted)), TableStep(model(shifted, sparse=False))
    for _ in range(3):
        assert step((X.copy(), Y)) == plain((X.copy(), Y))


def test_column_that_was_never_meant_as_ids_does_not_matter() -> None:
    def first_half(net: Any, x: Any) -> Any:
        return net.user(x[:12, 0]).repeat(2, 1) + net.items(x[:, 1:])

    step = TableStep(model(first_half))
    wrong = X.copy()
    wrong[12:, 0] = -1  # no user, and not looked up
    for batch in (BATCH, (wrong, Y), (wrong, Y)):
        step(batch)
    assert {*step.rows()["user.weight"]} == {*X[:12, 0].tolist()}


def test_trained_rows_are_read() -> None:
    step, plain = TableStep(model()), TableStep(model(sparse=False))
    step.source.trained[0][int(X[0, 0])] = np.full(4, 9, np.float32)
    plain.values["user.weight"][X[0, 0]] = 9
    assert step(BATCH) == plain(BATCH)


def test_weight_on_the_meta_device_costs_no_memory_and_no_import_of_a_compiler() -> None:
    class Checked(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), given: Any = None
        ) -> Any:
            assert "normal_" not in func.name()  # which imports torch._dynamo
            return func(*args, **(given or {}))

    def build() -> Any:
        net = Net(both, sparse=True)
        with Checked():
            net.user = nn.Embedding(10**9, 4, sparse=True, device="meta", padding_idx=7)
        return net

    TableStep(model())(BATCH)  # the first step compiles
    TorchModel(build, F.mse_loss).tables(0)  # Checked imports torch._dynamo itself
    tracemalloc.start()
    step = TableStep(TorchModel(build, F.mse_loss))
    step((np.hstack([X[:, :1] + 10**9 - 40, X[:, 1:]]), Y))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**7
    ids = np.arange(2000)
    rows = step.readers["user.weight"].take(ids)
    assert rows.std() == pytest.approx(1, abs=0.05)
    assert not rows[7].any()


@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_any_integer_is_an_id_of_a_table_embedding(mode: Any) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = TableEmbedding(4, mode, initial=Uniform(0.1))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            rows = self.word(x)
            return self.head(rows.sum(1) if mode is None else rows)[:, 0]

    step = TableStep(TorchModel(Pair, F.mse_loss))
    assert step.model.tables(0) == {"word.weight": Table(dim=4, initial=Uniform(0.1))}
    ids = X * np.int64(2**58) - 2**62
    ids[0, 0] = -(2**63)
    step((ids, Y))
    assert {*step.rows()["word.weight"]} == {*ids.ravel().tolist()}


def test_parameters_that_a_job_names_are_tables() -> None:
    named, plain = model(sparse=False), TableStep(model(sparse=False))
    named.make_tables(["user*", ("items.*",)])
    step = TableStep(named)
    assert step(BATCH) == plain(BATCH)
    assert step.parameters.keys() == {"head.weight", "head.bias"}
    named.make_tables([])
    assert not named.tables(0)


def test_one_weight_in_two_places_is_one_table() -> None:
    def build() -> Any:
        net = Net(lambda net, x: net.user(x[:, 0]) + net.items(x), sparse=True)
        net.items.weight = net.user.weight
        return net

    step = TableStep(TorchModel(build, F.mse_loss))
    step(BATCH)
    assert [*step.rows()] == ["user.weight"]
    assert {*step.rows()["user.weight"]} == {*X.ravel().tolist()}


def test_copies_of_a_model_have_tables_of_their_own() -> None:
    shared = Net(both, sparse=True)
    first = TorchModel(lambda: shared, F.mse_loss)
    steps = TableStep(first), TableStep(copy.deepcopy(first))
    expected = steps[0](BATCH)
    assert steps[1](BATCH) == expected
    steps[1].source.trained[0][int(X[0, 0])] = np.full(4, 9, np.float32)
    assert steps[1](BATCH) != steps[0](BATCH) == expected


def tied(kind: str) -> Any:
    net = Net(lambda net, x: net.tied(net.user(x[:, 0])) if kind else both(net, x), sparse=True)
    net.tied = nn.Linear(4, 30)
    net.tied.weight = net.user.weight
    return net


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: tied("used"), "weight of a table in linear: it is for nothing but look-ups"),
        (lambda: Net(lambda net, x: both(net, x) @ net.user.weight.mT), "'mT', which a step uses"),
        (lambda: Net(lambda net, x: both(net, x) @ net.user.weight), "weight of a table in matmul"),
        (lambda: Net(both, sparse=True, max_norm=1.0), r"max_norm=1\.0"),
        (lambda: Net(both, sparse=True).double(), r"'user\.weight'.*torch\.float64"),
        (lambda: Net(both, sparse=True).half(), r"expected torch\.float32 of shape \(rows, dim"),
    ],
)
def test_weight_that_cannot_be_a_table_is_refused(build: Any, text: str) -> None:
    wrapped = TorchModel(build, F.mse_loss)
    wrapped.make_tables(["user.*"])
    with pytest.raises((ConfigError, AttributeError), match=text):
        TableStep(wrapped)(BATCH)


@pytest.mark.parametrize(
    ("pattern", "text"), [("head.bias", r"\[1\]"), ("fixed", r"\[3, 2\], frozen")]
)
def test_parameter_without_trained_rows_is_no_table(pattern: str, text: str) -> None:
    def build() -> Any:
        net = Net(both)
        net.fixed = nn.Parameter(torch.ones(3, 2), requires_grad=False)
        return net

    wrapped = TorchModel(build, F.mse_loss)
    wrapped.make_tables([pattern])
    with pytest.raises(ConfigError, match=text):
        wrapped.tables(0)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (X + 25, "has 30 rows, but the batch has id"),
        (-X, "expected 0 to 29"),
        (X.astype(np.float32), "'user.weight' are float32; expected integers"),
    ],
)
def test_ids_that_are_none_of_the_table_are_refused(x: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        TableStep(model())((x, Y))


def test_copy_of_a_trained_module_has_no_rows() -> None:
    step = TableStep(model())
    step(BATCH)
    with pytest.raises(ConfigError, match="and no copy of it"):
        copy.deepcopy(step.model.module)(torch.from_numpy(X))


def test_module_may_look_rows_up_before_there_is_a_job() -> None:
    net = Net(both)
    expected = net(torch.from_numpy(X))
    wrapped = TorchModel(lambda: net, F.mse_loss)
    wrapped.make_tables(["user.*", "items.*"])
    assert torch.equal(wrapped.module(torch.from_numpy(X)), expected)
    assert isinstance(net.user.weight, TableWeight)
    assert net.user.weight.shape == (30, 4)


def test_virtual_table_before_there_is_a_job_has_initial_rows() -> None:
    word = TableEmbedding(4)
    expected = Normal(1.0).rows(0, np.arange(3), 4)
    np.testing.assert_array_equal(word(torch.arange(3)).detach().numpy(), expected)
    with pytest.raises(ConfigError, match="shape of a table in which any int64"):
        _ = word.weight.shape


def test_mode_of_a_table_embedding_is_checked() -> None:
    with pytest.raises(ConfigError, match="mode='max'"):
        TableEmbedding(4, "max")  # type: ignore[arg-type]


DATA = Arrays((X, Y), (X, Y))
RULES = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


def job(model_: Any, rule: str = "SGD", **options: Any) -> Job:
    return Job(**{"batch_size": 8, "steps": 9} | options, model=model_, data=DATA,
               optimizer=RULES[rule])  # fmt: skip


def whole(parameters: Any) -> dict[str, Any]:
    return {n: v.whole() if isinstance(v, TableReader) else v for n, v in parameters.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.5}, {"clip_norm_each": 0.5}, {"initial": Net(both).state_dict()}],
)
def test_training_has_the_bits_of_dense_weights(
    rule: str, options: dict[str, Any], one_thread: None
) -> None:
    tables = whole(zmqtrain.run(job(model(), rule, **options)).parameters)
    plain = zmqtrain.run(job(model(sparse=False), rule, **options)).parameters
    same(tables, plain, 1e-6 if "clip_norm_each" in options else 0.0)


def test_trainer_measures_and_predicts_with_trained_rows() -> None:
    trainer = zmqtrain.Trainer(model(), RULES["Adagrad"], batch_size=8)
    before = trainer.evaluate(X, Y)["loss"]
    trainer.fit(X, Y, epochs=3, validation_data=(X, Y), verbose=False)
    assert trainer.evaluate(X, Y)["loss"] == trainer.history.history["val_loss"][-1] < before
    net = Net(both, sparse=True)
    load_state_dict(net, trainer.weights)
    np.testing.assert_allclose(net(torch.from_numpy(X)).detach(), trainer.predict(X), 1e-5, 1e-6)
    with pytest.raises(ConfigError, match=r"'user\.weight' anew; give the trainer a logdir"):
        trainer.fit(X, Y, verbose=False)


def test_loop_of_the_users_own_ends_with_a_module_of_torch() -> None:
    expected = whole(zmqtrain.run(job(model())).parameters)
    with zmqtrain.attach(job(model())) as session:
        for x, y in session.batches():
            loss = F.mse_loss(session.module(x), y)
            loss.backward()
            session.step(loss)
        assert session.evaluate() == {}
    same({n: v.numpy() for n, v in session.module.state_dict().items()}, expected)
    assert session.module(torch.from_numpy(X)).requires_grad


def test_loop_of_the_users_own_measures_named_tables() -> None:
    options: Any = {"tables": {"user.*": Table()}, "steps": 2}
    with zmqtrain.attach(job(model(sparse=False), **options)) as session:
        found = []
        for x, y in session.batches():
            found.append(session.evaluate()["loss"])
            loss = F.mse_loss(session.module(x), y)
            loss.backward()
            session.step(loss)
    assert len(found) == 2
    assert isinstance(session.module.user.weight, nn.Parameter)


def test_module_with_tables_alone_is_trained_as_by_torch() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(30, 4, sparse=True)
            self.item = nn.Embedding(40, 4, sparse=True)

        def forward(self, x: Any) -> Any:
            return (self.user(x[:, 0]) * self.item(x[:, 1])).sum(1)

    made = job(TorchModel(Product, F.mse_loss), "Adagrad")
    assert not [
        *mistakes_of_a_step(made.model, {}, BATCH, tables=readers_of(made.table_variables()))
    ]
    found = whole(zmqtrain.run(made).parameters)
    assert found.keys() == {"user.weight", "item.weight"}
    first = made.model.tables(0)["user.weight"].initial
    changed = (found["user.weight"] != first.array).any(1)
    assert np.flatnonzero(changed).tolist() == np.unique(X[:, 0]).tolist()


def test_rows_of_any_id_go_into_a_module_that_is_not_trained() -> None:
    class Word(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = TableEmbedding(4, "mean")
            self.head = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.head(self.word(x))[:, 0]

    trainer = zmqtrain.Trainer(TorchModel(Word, F.mse_loss), RULES["Adagrad"], batch_size=8)
    ids = X * 2**50
    trainer.fit(ids, Y, epochs=2, verbose=False)
    net = Word()
    load_state_dict(net, trainer.weights)
    np.testing.assert_allclose(net(torch.from_numpy(ids)).detach(), trainer.predict(ids), 1e-5)


def test_files_of_weights_lack_rows_and_are_not_written(tmp_path: Path) -> None:
    trainer = zmqtrain.Trainer(model(), RULES["SGD"], batch_size=8)
    with pytest.raises(RunFailedError, match="a callback writes weights"):
        trainer.fit(X, Y, callbacks=[ModelCheckpoint(str(tmp_path / "x.npz"))], verbose=False)


def test_callback_cannot_set_weights_without_their_rows() -> None:
    class Back(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights(self.model.get_weights())

    trainer = zmqtrain.Trainer(model(), RULES["SGD"], batch_size=8)
    with pytest.raises(RunFailedError, match=r"rows of the tables user\.weight, items\.weight"):
        trainer.fit(X, Y, epochs=2, callbacks=[Back()], verbose=False)


def test_tables_of_a_logdir_are_loaded_into_a_module(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = nn.Embedding(30, 4, sparse=True)
            self.any = TableEmbedding(4)

        def forward(self, x: Any) -> Any:
            return (self.known(x[:, 0]) * self.any(x[:, 1])).sum(1)

    options: Any = {"batch_size": 8, "logdir": str(tmp_path)}
    trainer = zmqtrain.Trainer(TorchModel(Both, F.mse_loss), RULES["SGD"], **options)
    trainer.fit(X[:16], Y[:16], epochs=2, verbose=False)
    net = Both()
    load_state_dict(net, tmp_path)
    found = net(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(found, trainer.predict(X), 1e-5, 1e-6)


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_table_that_is_frozen_is_another_variable(is_frozen_first: bool, tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        net = Net(both, sparse=True)
        net.user.requires_grad_(False)
        return net

    models = (model(), TorchModel(frozen, F.mse_loss))[:: -1 if is_frozen_first else 1]
    zmqtrain.run(job(models[0], steps=1, logdir=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"have 'user\.weight' once as a table and once as"):
        zmqtrain.run(job(models[1], steps=2, logdir=str(tmp_path)))
