"""Traces of pushes by OpenTelemetry, the extra otel; imported only if a task is to write some.

A worker and a ps compute the ids of a push's spans, and whether it is sampled, from the push
itself, so that no message carries them. Spans are made when they are over.
"""

from __future__ import annotations

import secrets
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
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )
except ImportError:
    raise ConfigError(
        "--trace is given, but OpenTelemetry is not installed; expected its SDK and its exporter; "
        "install zmqtrain[otel], or leave it out"
    ) from None

SERVICE = "zmqtrain"
CLOSE_S = 3.0
STEP, PUSH = "step", "push"

Spans = Mapping[str, tuple[float, float]]
"""Begin and end by name, in seconds of the clock that the caller gives the present time of."""


PushId = tuple[int, int, int]
"""The worker of a push, its incarnation, and the number of the push in that life."""


class Traces:
    """Exports the spans of a task by OTLP, as the variables ``OTEL_EXPORTER_OTLP_...`` say."""

    def __init__(self, share: float, task: str) -> None:
        """``share``: of the pushes, from 0 to 1; all tasks of a job have the same."""
        self._limit = round(share * 2**64)
        self._ids = _Ids()
        resource = Resource.create({"service.name": SERVICE, "service.instance.id": task})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource,
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._applied: dict[int, tuple[float, float]] = {}

    def step(self, push: PushId, spans: Spans, now: float, result: str) -> None:
        """Note a worker's step; ``spans``: of the step, the push, and other parts of the step."""
        if self._is_sampled(push):
            attributes = _attributes(push, result)
            since_ns = time.time_ns() - round(now * 1e9)
            for name, span in spans.items():
                above = "" if name == STEP else STEP
                self._export(push, name, above, span, since_ns, attributes)

    def applied(self, worker: int, ended_at: float, seconds: float) -> None:
        """Note the update that holds a worker's push, for :meth:`answered`."""
        self._applied[worker] = ended_at - seconds, ended_at

    def answered(self, push: PushId, arrived_at: float, now: float, result: str) -> None:
        """Note that a ps has answered a push."""
        update = self._applied.pop(push[0], None)
        if not self._is_sampled(push):
            return
        attributes = _attributes(push, result)
        since_ns = time.time_ns() - round(now * 1e9)
        own = self._export(push, "serve", PUSH, (arrived_at, now), since_ns, attributes)
        if update is not None:
            self._export(push, "apply", own, update, since_ns, attributes)
            self._export(push, "answer", own, (update[1], now), since_ns, attributes)

    def close(self) -> None:
        """Export what is left, unless the collector does not take it in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _is_sampled(self, push: PushId) -> bool:
        return push[-1] > 0 and _digest(push, "sample", 8) < self._limit

    def _export(
        self,
        push: PushId,
        name: str,
        parent: str | int,
        span: tuple[float, float],
        since_ns: int,
        attributes: Mapping[str, str | int],
    ) -> int:
        """Export a span, and return its id.

        ``parent``: an id, or the name of a worker's span. ``since_ns``: when the clock was zero.
        """
        self._ids.trace = _digest(push, "trace", 16)
        self._ids.span = _digest(push, name, 8) if name in (STEP, PUSH) else 0
        context = Context()
        if parent:
            held = parent if isinstance(parent, int) else _digest(push, parent, 8)
            above = SpanContext(self._ids.trace, held, True, TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(above), context)
        began, ended = (since_ns + round(at * 1e9) for at in span)
        made = self._tracer.start_span(name, context, attributes=attributes, start_time=began)
        made.end(ended)
        own: int = made.get_span_context().span_id
        return own


class _Ids:
    """Gives the ids that it is told; 0: a random one."""

    trace, span = 0, 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span or 1 + secrets.randbelow(2**64 - 1)

    def is_trace_id_random(self) -> bool:
        return True  # as even as random ones, so others may sample by them


def _digest(push: PushId, what: str, nbytes: int) -> int:
    """Return a number of this size for a part of a push."""
    text = "/".join(map(str, (what, *push)))
    return int.from_bytes(blake2b(text.encode(), digest_size=nbytes).digest(), "big")


def _attributes(push: PushId, result: str) -> dict[str, str | int]:
    return {"worker": push[0], "push": push[2], "result": result}
