"""Traces of pushes, with OpenTelemetry's own exporter into memory."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

import zmqtrain
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Cluster, Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import Digits
from zmqtrain.hosting.actors import actors_of, run_all
from zmqtrain.job import Job
from zmqtrain.models import MLP
from zmqtrain.optim import SGD
from zmqtrain.planning.plan import plan_for
from zmqtrain.transport.memory import MemoryTransport

pytest.importorskip("opentelemetry.sdk.trace", reason="needs pip install '.[dev]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs '.[dev]'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from zmqtrain.observe import traces
from zmqtrain.observe.traces import Traces


class Exporter(InMemorySpanExporter):
    """That of all tasks, which outlives each of them."""

    def shutdown(self) -> None:
        pass


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    memory = Exporter()
    monkeypatch.setattr(traces, "OTLPSpanExporter", lambda: memory)
    return memory


def named(spans: list[ReadableSpan]) -> list[tuple[str, str]]:
    return sorted(
        (str(each.resource.attributes["service.instance.id"]), each.name) for each in spans
    )


def by_trace(exporter: Exporter) -> dict[int, list[ReadableSpan]]:
    found = defaultdict(list)
    for span in exporter.get_finished_spans():
        found[span.context.trace_id].append(span)
    return found


async def trained(job: Job, ps: int, workers: int) -> None:
    """Train by a cluster in this process, whose tasks trace every push."""
    plan, transport = (
        plan_for(job, Cluster(tuple(f"127.0.0.1:{1 + i}" for i in range(ps)), workers)),
        MemoryTransport(),
    )
    config = TaskConfig(role=Role.CHIEF, job="digits", lane="memory", heartbeat_s=0.05, lease_s=5)
    data = job.load_data()
    actors: list[JobActor] = []
    for task in plan.tasks:
        own = plan.with_own_model() if task.role is Role.WORKER else plan
        actors += actors_of(config.of(task), own, lambda _: transport, lambda _: None, data)
    found = {actor.task: Traces(1.0, str(actor.task)) for actor in actors}
    for actor in actors:
        actor.traces = found[actor.task]
    await run_all(actors)
    transport.close()
    for each in found.values():
        each.close()


def test_trace_of_a_push_has_the_step_and_what_each_ps_did(exporter: Exporter) -> None:
    job = Job(
        model=MLP(64, 4, 10), data=Digits(), optimizer=SGD(0.1), steps=6, policy="sync-replicas"
    )
    asyncio.run(trained(job, ps=2, workers=2))
    found = by_trace(exporter)
    assert len(found) == 12  # one push of each worker in each step
    for spans in found.values():
        (worker,) = {name for name, _ in named(spans)} - {"ps 0", "ps 1"}
        of_ps = [(f"ps {shard}", name) for shard in (0, 1) for name in ("answer", "apply", "serve")]
        assert named(spans) == sorted(
            [*of_ps, (worker, "compute"), (worker, "push"), (worker, "step")]
        )
        ids = {span.context.span_id: span for span in spans}
        parents = {
            (span.name, ids[span.parent.span_id].name if span.parent else "") for span in spans
        }
        assert parents == {
            *(("step", ""), ("compute", "step"), ("push", "step")),
            *(("serve", "push"), ("apply", "serve"), ("answer", "serve")),
        }
        for span in spans:
            assert span.start_time <= span.end_time
            assert span.attributes["result"] == "applied"


def test_worker_and_ps_sample_the_same_share_of_the_pushes(exporter: Exporter) -> None:
    worker, ps = (Traces(0.1, task) for task in ("worker 0", "ps 0"))
    pushes = [(index, 1_764_000_000_000, number) for index in (0, 1) for number in range(1, 501)]
    for push in pushes:
        worker.note(push, {"step": ("", 0.0, 1.0), "push": ("step", 0.5, 1.0)}, 1.0, "applied")
        ps.applied(push[0], 0.9, 0.1)
        ps.answered(push, 0.8, 1.0, "applied")
    worker.close()
    ps.close()
    found = by_trace(exporter)
    assert 60 < len(found) < 140
    assert {len(spans) for spans in found.values()} == {5}


def test_answer_to_a_pull_is_no_part_of_a_trace(exporter: Exporter) -> None:
    ps = Traces(1.0, "ps 0")
    ps.answered((0, 1, 0), 0.0, 1.0, "")
    ps.close()
    assert not exporter.get_finished_spans()


def test_opentelemetry_is_imported_by_one_module_which_is_imported_on_demand() -> None:
    package = Path(zmqtrain.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    assert [path.stem for path in texts if "from opentelemetry" in texts[path]] == ["traces"]
    lines = [line for text in texts.values() for line in text.splitlines()]
    imports = [line for line in lines if "zmqtrain.observe.traces import" in line]
    assert imports and all(line.startswith("    ") for line in imports)
