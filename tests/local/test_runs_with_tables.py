"""Whole runs of a model with tables, beside the same model whose rows are ordinary parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.constants import Constants
from tests.recommenders import DATA, ITEMS, USERS, Dense, Only, Recommender, make_job
from zmqtrain.actors.joining import Admission
from zmqtrain.actors.task import JobActor
from zmqtrain.chief import linked_job
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import ExitCode, SegmentError
from zmqtrain.exchanges import lanes
from zmqtrain.local.in_process import train_here
from zmqtrain.observe.summary import Summary
from zmqtrain.store.row_store import RowStore

CLUSTERS = {
    "one worker": {},
    "2 ps": {"workers": 2, "ps": 2},
    "shards on workers": {"workers": 2, "ps": 0, "exchange": "direct"},
    "a board": {"workers": 2, "ps": 0, "exchange": "board"},
    "copies": {"workers": 3, "ps": 0, "exchange": "direct", "copies": 2},
    "everything everywhere": {"workers": 2, "ps": 0, "exchange": "one-shot"},
}


def train(model: Any, cluster: Any, **fields: Any) -> Summary:
    where = {name: cluster[name] for name in ("workers", "ps") if name in cluster}
    given = {name: cluster[name] for name in cluster if name not in where}
    given |= {"policy": "sync-replicas" if where else "hogwild"} | fields
    return train_here(make_job(model, **given), **where)


def learned(summary: Summary) -> tuple[Any, ...]:
    evaluations = [tuple(row.items()) for row in summary.evaluations]
    return summary.measures, summary.parameters["bias"].tobytes(), evaluations, summary.pushes


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(
    "fields",
    [{"epochs": 2, "steps_per_epoch": 3}, {"steps": 6, "clip_norm": 0.05}],
    ids=["epochs", "clipped"],
)
def test_run_with_tables_is_the_run_with_parameters(cluster: Any, fields: Any) -> None:
    found = [train(model, cluster, **fields) for model in (Recommender(), Dense())]
    assert learned(found[0]) == learned(found[1])


@pytest.mark.parametrize("name", ["shards on workers", "copies", "everything everywhere"])
def test_workers_that_reach_their_own_shard_alone_send_rows_to_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_segment = lanes.map_segment

    async def map_own(actor: JobActor, shard: int, joined: Admission) -> lanes.Near | None:
        is_own = actor.task == Task(Role.WORKER, actor.plan.hosts[shard])
        return await map_segment(actor, shard, joined) if is_own else None

    monkeypatch.setattr(lanes, "map_segment", map_own)
    found = [train(model, CLUSTERS[name], clip_norm=0.05) for model in (Recommender(), Dense())]
    assert learned(found[0]) == learned(found[1])


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_summary_counts_the_rows_that_were_trained(cluster: Any) -> None:
    summary = train(Only(USERS, None), cluster)
    batches = 6 * cluster.get("workers", 1)
    order = make_job().plan(len(DATA.load(None)[0]))
    examples = [i for batch in range(batches) for i in order.indices(batch)]
    ids = DATA.load(None)[0].take(examples)[0]
    user, item = summary.tables["user"], summary.tables["item"]
    assert (user["rows"], user["trained"]) == (USERS, len(set(ids[:, 0].tolist())))
    assert (item["rows"], item["trained"]) == (None, len(set(ids[:, 1].tolist())))
    assert item["nbytes"] and f"item: {item['trained']} rows trained" in "\n".join(summary.lines())


@pytest.mark.parametrize("name", CLUSTERS)
def test_checkpoint_has_the_rows_for_any_number_of_shards(name: str, tmp_path: Path) -> None:
    """Each kind of cluster leaves one for another kind, and goes on with that of a third."""
    names, found = [*CLUSTERS], []
    first, then = CLUSTERS[name], CLUSTERS[names[names.index(name) - 1]]
    for model in (Recommender(), Dense()):
        logdir = str(tmp_path / type(model).__name__)
        for cluster, steps in ((first, 3), (then, 6)):
            fields = {"policy": "sync-replicas", "logdir": logdir}
            summary = train(model, cluster, steps=steps, **fields)
        found.append((summary.measures, summary.parameters["bias"].tobytes()))
    assert found[0] == found[1]


def test_summary_of_a_cluster_has_the_rows_of_tables_that_fit_together(
    constants: Constants,
) -> None:
    both = train(Recommender(), CLUSTERS["2 ps"]).parameters
    nbytes = sum(both[name].whole().nbytes for name in ("user", "item"))
    constants(linked_job, KEPT_NBYTES=nbytes - 1)
    fewer = train(Recommender(), CLUSTERS["2 ps"]).parameters
    assert len(both.keys() & {"user", "item"}) == 2
    assert len(fewer.keys() & {"user", "item"}) == 1


def test_ids_without_a_bound_train_as_those_of_a_table_of_known_size() -> None:
    both = [train(model, CLUSTERS["2 ps"]) for model in (Recommender(), Recommender(None, ITEMS))]
    assert learned(both[0]) == learned(both[1])


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_memory_without_room_for_rows_ends_the_job_with_a_sentence(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room, calls = RowStore.make_room, list[int]()

    def refuse(store: RowStore, rows: int) -> None:
        calls.append(rows)
        if len(calls) > 8:
            raise SegmentError("/dev/shm has no room for 1 MB more")
        make_room(store, rows)

    monkeypatch.setattr(RowStore, "make_room", refuse)
    monkeypatch.setattr(RowStore, "has_room", lambda *_: len(calls) < 6)
    summary = train(Recommender(), cluster, logdir=str(tmp_path), steps=50)
    assert summary.exit_code == ExitCode.USAGE
    assert "no room for 1 MB more" in summary.ended
    assert 0 < summary.global_step < 50
