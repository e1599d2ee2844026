"""Traces of pushes by OpenTelemetry, the extra otel; imported only if a task is to write some.

A worker and a ps compute the ids of a push's spans, and whether it is sampled, from the push
itself, so that no message carries them. Spans are made when they are over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from hashlib import blake2b

from zmqtrain.errors import ConfigError

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
except ImportError:
    raise ConfigError(
        "--trace is given, but OpenTelemetry is not installed; expected its SDK and its exporter; "
        "install zmqtrain[otel], or leave it out"
    ) from None

SERVICE = "zmqtrain"
CLOSE_S = 3.0

PushId = tuple[int, int, int]
"""The worker of a push, its incarnation, and the number of the push in that life."""

Spans = Mapping[str, tuple[str, float, float]]
"""By name: the name of the span above, "" for none; begin and end by some clock, in seconds."""


class Traces:
    """Exports the spans of a task by OTLP, configured by variables ``OTEL_EXPORTER_OTLP_...``."""

    def __init__(self, share: float, task: str) -> None:
        """``share``: traced share of the pushes, from 0 to 1, the same in all tasks of a job."""
        self._limit, self._task, self._ids = round(share * 2**64), task, _Ids()
        resource = Resource.create({"service.name": SERVICE, "service.instance.id": task})
        self._provider = TracerProvider(
            ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._updates: dict[int, tuple[float, float]] = {}

    def note(self, push: PushId, spans: Spans, now: float, result: str) -> None:
        """Export spans of a push if it is sampled; ``now``: the present time of their clock."""
        if not push[-1] or _digest(push, "sample", 8) >= self._limit:
            return
        since_ns, trace = time.time_ns() - round(now * 1e9), _digest(push, "trace", 16)
        attributes = {"worker": push[0], "push": push[2], "result": result}
        for name, (above, began, ended) in spans.items():
            self._ids.trace, self._ids.span = trace, _digest(push, name, 8)
            context = Context()
            if above:
                sampled = TraceFlags(TraceFlags.SAMPLED)
                parent = SpanContext(trace, _digest(push, above, 8), True, sampled)
                context = set_span_in_context(NonRecordingSpan(parent), context)
            span = self._tracer.start_span(
                name.rpartition("/")[2],
                context,
                attributes=attributes,
                start_time=since_ns + round(began * 1e9),
            )
            span.end(since_ns + round(ended * 1e9))

    def applied(self, worker: int, ended_at: float, seconds: float) -> None:
        """Note the update that holds a worker's push, for :meth:`answered`."""
        self._updates[worker] = ended_at - seconds, ended_at

    def answered(self, push: PushId, arrived_at: float, now: float, result: str) -> None:
        """Note that this ps has answered a push."""
        serve = f"{self._task}/serve"
        spans = {serve: ("push", arrived_at, now)}
        if update := self._updates.pop(push[0], None):
            spans[f"{self._task}/apply"] = serve, *update
            spans[f"{self._task}/answer"] = serve, update[1], now
        self.note(push, spans, now, result)

    def close(self) -> None:
        """Export the remaining spans, unless the collector does not take them in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Ids:
    """Generates the ids that were set."""

    trace, span = 0, 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span

    def is_trace_id_random(self) -> bool:
        return True  # as even as random ones, so others may sample by them


def _digest(push: PushId, what: str, nbytes: int) -> int:
    """Return a number of this size for a part of a push."""
    text = "/".join(map(str, (what, *push)))
    return int.from_bytes(blake2b(text.encode(), digest_size=nbytes).digest(), "big")
