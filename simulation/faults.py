"""The faults that a schedule inflicts on the tasks of a run."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_NBYTES = 400  # almost a chunk


@dataclass(frozen=True, slots=True)
class Weather:
    """The fate of messages. Times are in seconds; chances are from 0 to 1."""

    delay_s: float = 0.001  # at least
    jitter_s: float = 0.001  # mean of what is added
    loss: float = 0.0
    repetition: float = 0.0
    overtaking: bool = False  # whether messages of one connection may lose their order
    large_s: float = 0.0  # that a message of more than LARGE_NBYTES occupies its connection

    def __str__(self) -> str:
        words = [
            f"delays of {self.delay_s:g} s + {self.jitter_s:g} s",
            f"{self.loss:.0%} lost" if self.loss else "",
            f"{self.repetition:.0%} repeated" if self.repetition else "",
            "out of order" if self.overtaking else "",
        ]
        return ", ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, or that somebody does. Times are in virtual seconds.

    ``kind``:
      lose        the process is gone for good
      kill        the process is gone, and starts again after ``lasts_s``: at once, or in the
                  middle of its next work, after ``lines`` lines of its code have run;
                  ``mild``: its connections look alive for a while; ``returns_as``: the name under
                  which it starts again, if another
      terminate   the process is told to end (SIGTERM)
      stop        the process is stopped (SIGSTOP) for ``lasts_s``
      cut         ``names`` and the others do not reach one another for ``lasts_s``; ``mild``:
                  messages arrive after it
      break       connections of the process break, and are made again
      storm       ``weather`` for ``lasts_s``
      switch      somebody changes the policy to ``spec``
      save        somebody asks for a checkpoint
      interrupt   somebody presses Ctrl-C
    """

    at: float
    kind: str
    names: tuple[str, ...] = ()
    lasts_s: float = 0.0
    mild: bool = False
    lines: int = 0
    weather: Weather | None = None
    spec: str = ""
    returns_as: str = ""

    @property
    def ends_at(self) -> float:
        return self.at + self.lasts_s

    def __str__(self) -> str:
        details = {
            "for": f"{self.lasts_s:g} s" if self.lasts_s else "",
            "after": f"{self.lines} lines" if self.lines else "",
            "in": str(self.weather or ""),
            "to": self.spec,
        }
        words = [self.kind, ", ".join(self.names), "mildly" if self.mild else ""]
        words += [f"{word} {text}" for word, text in details.items() if text]
        return " ".join(filter(None, words))
