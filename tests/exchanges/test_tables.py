"""Rows of tables in every exchange: what is read, and what becomes of their gradients."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.chunk_sizes import chunks_of
from tests.constants import Constants
from tests.exchanges.conftest import KINDS, OpenExchange, each_step, values
from tests.plans import planned
from tests.recommenders import BATCH, DATA, DIM, ITEMS, USERS, Dense, Only, Recommender, make_job
from zmqtrain import Job
from zmqtrain.errors import ConfigError, DataError, FencedError
from zmqtrain.exchanges.rows import ShardRows
from zmqtrain.models.base import written
from zmqtrain.models.tables import Given, Ids, Rows, RowsOf, Table, Uniform
from zmqtrain.optim import LAMB, SGD, Adagrad, Adam, RowwiseAdagrad, Rule, Update
from zmqtrain.training.exchange import Exchange, Membership, StepReport
from zmqtrain.wire import rows as rows_of_wire

POLICIES = ["hogwild", "bounded-staleness:1", "sync-replicas", "sync-replicas:aggregate=2"]
SIZES = {"user": USERS, "item": ITEMS}


async def read(membership: Membership, *wanted: tuple[int, Any]) -> list[Rows]:
    """Read rows as a model does, in a thread."""
    rows = membership.rows
    assert rows is not None
    given = [(table, np.asarray(ids, np.int64)) for table, ids in wanted]
    return await asyncio.to_thread(rows.read, given)


async def train(job: Job, exchange: Exchange) -> dict[str, Any]:
    """Train to the end; return all variables and rows before the last step."""
    examples = DATA.load(None)[0]

    def batch_of(number: int) -> tuple[Any, ...]:
        return examples.take(np.arange(BATCH * number, BATCH * (number + 1)))

    async for membership in each_step(job, exchange, batch_of):
        found = values(job, membership)
        if tables := job.table_variables():
            every = [(t.number, np.arange(SIZES[t.name])) for t in tables]
            found |= dict(zip(SIZES, await read(membership, *every), strict=True))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", [SGD(0.5), Adagrad(0.3)], ids=lambda r: type(r).__name__)
async def test_tables_train_as_the_same_parameters_do_without_them(
    open_exchange: OpenExchange, policy: str, rule: Rule
) -> None:
    found = []
    for model in (Recommender(), Dense()):
        job = make_job(model, policy=policy, optimizer=rule, prefetch=0)
        async with open_exchange(job) as exchange:
            found.append(await train(job, exchange))
    assert found[0].keys() == found[1].keys()
    for name in SIZES:
        assert not np.array_equal(found[0][name], Dense().parameters(0)[name])
        np.testing.assert_array_equal(found[0][name], found[1][name])


async def test_rows_that_nobody_trained_are_as_they_begin(open_exchange: OpenExchange) -> None:
    async with open_exchange(make_job(Recommender(None, ITEMS))) as exchange:
        membership = await exchange.join()
        far = np.array([-(2**63), -1, 0, 5, 2**63 - 1])
        user, item = make_job(Recommender(None, ITEMS)).table_variables()
        for _ in range(2):  # reading changes nothing
            users, items, none = await read(membership, (0, far), (1, [3, 4]), (1, []))
            np.testing.assert_array_equal(users, user.initial_rows(far))
            np.testing.assert_array_equal(items, item.initial_rows(np.array([3, 4])))
            assert none.shape == (0, DIM)


def ones(*ids: int, table: int = 0, value: float = 1.0) -> RowsOf:
    return RowsOf(table, np.array(ids, np.int64), np.full((len(ids), DIM), value, np.float32))


async def push(
    exchange: Exchange, membership: Membership, batch: int, *rows: RowsOf, finite: bool = True
) -> str:
    exchange.begin()
    for flat in membership.gradients:
        flat[...] = 0
    report = StepReport(batch, BATCH, 0.5, finite, rows=rows)
    return (await exchange.finish(report)).result


async def test_step_trains_the_rows_that_it_names_and_no_others(
    open_exchange: OpenExchange,
) -> None:
    ids = np.arange(USERS)
    async with open_exchange(make_job(optimizer=SGD(0.5))) as exchange:
        membership = await exchange.join()
        (before,) = await read(membership, (0, ids))
        assert await push(exchange, membership, 0, ones(2, 7, 39)) == "applied"
        expected = before.copy()
        expected[[2, 7, 39]] -= 0.5
        np.testing.assert_array_equal((await read(membership, (0, ids)))[0], expected)
        assert await push(exchange, membership, 1) == "applied"
        np.testing.assert_array_equal((await read(membership, (0, ids)))[0], expected)
        assert await push(exchange, membership, 2, ones(7, value=-1.0)) == "applied"
        expected[7] += 0.5
        np.testing.assert_array_equal((await read(membership, (0, ids)))[0], expected)


async def test_rows_that_were_asked_for_are_those_after_the_push(
    open_exchange: OpenExchange,
) -> None:
    ids, others = np.arange(USERS), np.arange(0, USERS, 3)
    async with open_exchange(make_job(optimizer=SGD(0.5))) as exchange:
        membership = await exchange.join()
        (expected,) = await read(membership, (0, ids))
        for batch, ahead in enumerate((ids, others, ids)):
            exchange.begin()
            for flat in membership.gradients:
                flat[...] = 0
            row = ones(batch, 7)
            report = StepReport(batch, BATCH, 0.5, True, rows=(row,), ahead=[(0, ahead)])
            assert (await exchange.finish(report)).result == "applied"
            expected[row.ids] -= 0.5
            if batch < 2:
                np.testing.assert_array_equal((await read(membership, (0, ids)))[0], expected)
        assert await push(exchange, membership, 3, ones(1)) == "applied"
        expected[1] -= 0.5  # nobody has read what was asked for before this push
        np.testing.assert_array_equal((await read(membership, (0, ids)))[0], expected)


async def test_mean_counts_a_row_that_a_gradient_lacks_as_zero(open_exchange: OpenExchange) -> None:
    job = make_job(optimizer=SGD(1.0), policy="sync-replicas:aggregate=2")
    async with open_exchange(job) as exchange:
        membership = await exchange.join()
        (before,) = await read(membership, (0, [1, 2, 3]))
        assert await push(exchange, membership, 0, ones(1, 2)) == "accumulated"
        assert await push(exchange, membership, 1, ones(2, 3)) == "applied"
        (after,) = await read(membership, (0, [1, 2, 3]))
        expected = before - np.array([[0.5], [1.0], [0.5]], np.float32)
        np.testing.assert_array_equal(after, expected)


class Seldom(Recommender):
    """No step looks an item up, and every second one nothing at all."""

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        users = batch[0][:, 0] if parameters["bias"][0] < 0 else []
        rows = parameters["user"].take(users)
        out["user"].add(users, rows + 1)
        out["bias"][...] = 1 if len(users) == 0 else -1
        return 0.5


async def test_step_may_leave_out_tables_or_all_of_them(open_exchange: OpenExchange) -> None:
    async with open_exchange(make_job(Seldom(), optimizer=SGD(0.5), prefetch=0)) as exchange:
        found = await train(make_job(Seldom(), optimizer=SGD(0.5), prefetch=0), exchange)
    begin = Dense().parameters(0)
    assert (found["user"] != begin["user"]).any()
    np.testing.assert_array_equal(found["item"], begin["item"])


async def test_gradient_that_is_not_finite_trains_no_row(open_exchange: OpenExchange) -> None:
    async with open_exchange(make_job()) as exchange:
        membership = await exchange.join()
        before = await read(membership, (0, [1]))
        bad = ones(1, value=np.nan)
        assert await push(exchange, membership, 0, bad, finite=False) == "refused"
        np.testing.assert_array_equal(await read(membership, (0, [1])), before)
        assert await push(exchange, membership, 1, ones(1)) == "applied"


async def test_norm_counts_the_rows(open_exchange: OpenExchange) -> None:
    found = []
    for model in (Recommender(), Dense()):
        job = make_job(model, policy="sync-replicas:aggregate=2", clip_norm=0.05, prefetch=0)
        async with open_exchange(job) as exchange:
            found.append(await train(job, exchange))
    np.testing.assert_array_equal(found[0]["user"], found[1]["user"])


async def test_rows_of_many_messages_come_whole(
    open_exchange: OpenExchange, constants: Constants
) -> None:
    constants(rows_of_wire, FRAME_NBYTES=3 * 4 * DIM)
    found = []
    for model in (Recommender(), Dense()):
        job = make_job(model, policy="sync-replicas", prefetch=0)
        async with open_exchange(job) as exchange:
            found.append(await train(job, exchange))
    for name in SIZES:
        np.testing.assert_array_equal(found[0][name], found[1][name])


class Long(Recommender):
    def tables(self, seed: int) -> dict[str, Table]:
        return {name: Table(dim=8, rows=USERS, initial=Uniform(0.5)) for name in SIZES}


@pytest.mark.parametrize(("spec", "loss"), [("bf16", 2**-8), ("int8", 1 / 254)])
async def test_rows_that_travel_are_compressed_both_ways_but_not_for_an_evaluation(
    spec: str, loss: float
) -> None:
    ids = np.arange(0, USERS, 2)
    gradient = np.random.default_rng(0).standard_normal((len(ids), 8), np.float32)
    job = make_job(Long(), optimizer=SGD(1.0), compression=spec)
    async with KINDS["2 ps, by messages"](job) as exchange:
        membership = await exchange.join()
        rows = membership.rows
        assert isinstance(rows, ShardRows)

        async def exact() -> Rows:
            return (await asyncio.to_thread(rows.exact().read, [(0, ids)]))[0]

        def is_coarse(found: Any, given: Any) -> bool:
            error = np.abs(found - given)
            bound = 1.01 * loss * np.abs(given).max(axis=1, keepdims=True)
            return bool((error <= bound).all() and (error > bound / 100).any())

        before = await exact()
        np.testing.assert_array_equal(before, job.table_variables()[0].initial_rows(ids))
        assert is_coarse((await read(membership, (0, ids)))[0], before)
        assert await push(exchange, membership, 0, RowsOf(0, ids, gradient)) == "applied"
        assert is_coarse(before - await exact(), gradient)
        for batch in (1, 2):  # to infinity, which a compression would hide
            assert (
                await push(exchange, membership, batch, RowsOf(0, ids, gradient * 1e38))
                == "applied"
            )
        assert np.isinf((await read(membership, (0, ids)))[0]).any()
        rows.close()
        with pytest.raises(FencedError, match="this task ends"):
            await exact()


class Wide(Recommender):
    """Has parameters beside its rows, whose gradients are complete before those of the rows are."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return super().parameters(seed) | {f"wide{n}": np.ones(60, np.float32) for n in range(2)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        for n in range(2):
            out[f"wide{n}"][...] = parameters[f"wide{n}"] * np.float32(0.1 + n)
            written(out, f"wide{n}")
        return super().loss_and_gradients(parameters, batch, out)


class WideDense(Wide, Dense):
    """The same without tables."""


@pytest.mark.parametrize("messages", ["few", "many"])
async def test_rows_follow_a_gradient_that_is_sent_while_it_is_computed(
    open_exchange: OpenExchange, constants: Constants, messages: str
) -> None:
    if messages == "many":
        constants(rows_of_wire, FRAME_NBYTES=3 * 4 * DIM)
    found = []
    with chunks_of(20):
        for model in (Wide(), WideDense()):
            job = make_job(model, policy="sync-replicas", prefetch=0, overlap=True)
            async with open_exchange(job) as exchange:
                found.append(await train(job, exchange))
    for name in (*SIZES, "bias", "wide0", "wide1"):
        np.testing.assert_array_equal(found[0][name], found[1][name])
        assert not np.array_equal(found[0][name], WideDense().parameters(0)[name])


async def test_model_of_tables_alone_is_trained(open_exchange: OpenExchange) -> None:
    job = make_job(Only(), prefetch=0)
    async with open_exchange(job) as exchange:
        found = await train(job, exchange)
    begin = Dense().parameters(0)
    assert all((found[name] != begin[name]).any() for name in SIZES)


async def test_reader_of_rows_that_travel_ends_with_its_task() -> None:
    async with KINDS["2 ps, by messages"](make_job()) as exchange:
        membership = await exchange.join()
        rows = membership.rows
        assert rows is not None
        rows.close()
        with pytest.raises(Exception, match="this task ends"):
            await read(membership, (0, [1]))


def ids_of(*ids: int) -> Ids:
    return np.array(ids, np.int64)


class Wrong(Recommender):
    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        parameters["user"].take(ids_of(USERS))
        raise AssertionError("the id is refused before")


async def test_id_beyond_the_rows_of_a_table_is_an_error(open_exchange: OpenExchange) -> None:
    job = make_job(Wrong())
    async with open_exchange(job) as exchange:
        with pytest.raises(DataError, match=f"'user' has {USERS} rows, but the batch has id"):
            await train(job, exchange)


def test_what_a_model_says_of_its_tables_counts_where_the_job_says_nothing() -> None:
    class Bounded(Recommender):
        def tables(self, seed: int) -> dict[str, Table]:
            table = Table(SGD(0.5), dim=DIM, admit_after=2, forget_after=5, max_rows=9)
            return {"user": table, "item": table}

    job = make_job(Bounded(), tables={"user": Table(max_rows=7, optimizer=Adagrad(0.1))})
    limits = [(t.max_rows, t.forget_after, t.admit_after) for t in job.table_variables()]
    assert limits == [(7, 5, 2), (9, 5, 2)]
    assert [update.rule for update in job.table_updates()] == [Adagrad(0.1), SGD(0.5)]


def test_rule_of_a_table_may_have_l2_of_its_own() -> None:
    wrapped = Table(Update(Adam(0.1, catch_up=True), l2=0.25))
    job = make_job(tables={"user": wrapped}, l2=0.5)
    assert job.table_updates()[0] == Update(Adam(0.1, catch_up=True), l2=0.75)


class Short:
    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        return np.zeros((1, dim), np.float32)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"consistent_reads": True}, "consistent_reads is on"),
        ({"policy": "local-steps:4"}, "the policy is local-steps:4"),
        ({"moving_average": 0.9, "evaluate_average": True}, "rows have no moving average"),
        ({"tables": {"users": Table()}}, "'users', which fits no table; .* has user, item"),
        ({"tables": {"user": Table(dim=DIM + 1)}}, f"have {DIM + 1} elements; expected {DIM}, as"),
        ({"tables": {"user": Table(rows=0)}}, "'user' has 0 rows; expected a whole number"),
        ({"tables": {"user": 3}}, "expected tables by patterns"),
        ({"optimizer": RowwiseAdagrad(0.1)}, "rule for rows of tables, but would train 'bias'"),
        ({"tables": {"user": Table(optimizer=SGD)}}, "this is a class; expected an object"),
        ({"tables": {3: Table()}}, "expected tables by patterns"),
        ({"tables": {"user": Table(LAMB(0.1))}}, "'user' has LAMB.* needs norms of whole"),
        ({"tables": {"user": Table(Update(SGD(0.1), moving_average=0.9))}}, "no moving average"),
        ({"tables": {"user": Table(initial=Uniform)}}, "initial .*'user' is <class .*Uniform"),
        ({"tables": {"user": Table(initial=0.5)}}, "initial .* is 0.5; expected Uniform"),
        ({"tables": {"user": Table(initial=Short())}}, r"returns shape \(1, 3\) for 2 ids"),
        ({"tables": {"user": Table(initial=Given(np.ones((9, DIM))))}}, r"array of shape \(9, 3\)"),
    ],
)
def test_what_tables_cannot_have_is_refused_with_a_way_out(
    fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        planned(make_job(**fields))
