"""Statistics of a run: staleness and throughput."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_TRACKED = 4096  # versions; higher staleness counts as this


@dataclass(slots=True)
class Staleness:
    """The staleness of the applied gradients in versions, counted exactly."""

    counts: Counter[int] = field(default_factory=Counter)

    def observe(self, versions: int, gradients: int = 1) -> None:
        self.counts[min(versions, MAX_TRACKED)] += gradients

    def summary(self) -> dict[str, float]:
        """Return mean, p50, p99 and max; zeros before the first observation."""
        total = self.counts.total()
        if not total:
            return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
        mean = sum(versions * count for versions, count in self.counts.items()) / total
        return {
            "mean": mean,
            "p50": float(self._quantile(0.50, total)),
            "p99": float(self._quantile(0.99, total)),
            "max": float(max(self.counts)),
        }

    def _quantile(self, share: float, total: int) -> int:
        """Return the smallest staleness that ``share`` of the gradients do not exceed."""
        seen = 0
        for versions in sorted(self.counts):
            seen += self.counts[versions]
            if seen >= share * total:
                return versions
        return max(self.counts)


@dataclass(slots=True)
class Throughput:
    """Global steps between the first push and the last, start-up left out."""

    began_at: float | None = None  # monotonic seconds
    began_step: int = 0
    last_at: float = 0.0
    last_step: int = 0

    def observe(self, step: int, now: float) -> None:
        if self.began_at is None:
            self.began_at, self.began_step = now, step
        self.last_at, self.last_step = now, step

    @property
    def seconds(self) -> float:
        return 0.0 if self.began_at is None else self.last_at - self.began_at

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last step, 0 before the first."""
        return 0.0 if self.began_at is None else max(0.0, now - self.last_at)

    @property
    def steps_per_second(self) -> float:
        return (self.last_step - self.began_step) / self.seconds if self.seconds else 0.0
