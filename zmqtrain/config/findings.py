"""What a diagnosis finds, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from zmqtrain.errors import ExitCode


class Severity(StrEnum):
    """How bad a finding is; an error keeps the run from working."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the diagnosis: what is wrong, what was expected, what to do."""

    severity: Severity
    text: str

    @classmethod
    def error(cls, text: str) -> Finding:
        return cls(Severity.ERROR, text)

    @classmethod
    def warning(cls, text: str) -> Finding:
        return cls(Severity.WARNING, text)

    @classmethod
    def ok(cls, text: str) -> Finding:
        return cls(Severity.OK, text)


def report(findings: Iterable[Finding]) -> str:
    """Return the findings as text, a line each, the worst first."""
    order = list(Severity)
    ranked = sorted(findings, key=lambda finding: order.index(finding.severity))
    return "\n".join(f"{finding.severity}: {finding.text}" for finding in ranked)


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return USAGE if any finding is an error, else OK."""
    is_wrong = any(finding.severity is Severity.ERROR for finding in findings)
    return ExitCode.USAGE if is_wrong else ExitCode.OK
