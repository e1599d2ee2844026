"""Numbers with their units, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOTHING = "-"
"""The text of a table where there is no value."""


def duration(seconds: float) -> str:
    """Return a span of time in its one or two largest units."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, part, part_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part_size} {part}"
    return f"{whole} s"


def data_size(nbytes: float) -> str:
    """Return a number of bytes in the unit that keeps it below 1000."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} TB"


def measure_text(value: float) -> str:
    """Return a loss or another measure: four decimals, three digits if it is small."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or not value else f"{value:.3g}"


def measures_text(values: Mapping[str, float]) -> str:
    """Return "loss 0.2500, accuracy 0.9000"."""
    return ", ".join(f"{name} {measure_text(value)}" for name, value in values.items())


def counted(number: int, noun: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(texts: Sequence[str], most: int = 8) -> str:
    """Return texts in a row; of more than ``most`` the first and the last ones, and how many."""
    if len(texts) <= most:
        return ", ".join(texts)
    ends = [*texts[: most // 2], "...", *texts[-(most // 2) :]]
    return f"{', '.join(ends)} ({len(texts)} in all)"


def rate(per_second: float) -> str:
    """Return a rate; a slow one keeps two decimals."""
    return f"{per_second:.0f}" if per_second >= 10 else f"{per_second:.2f}"
