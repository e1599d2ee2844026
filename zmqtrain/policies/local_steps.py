"""Local steps: workers train by themselves for H batches, then agree on common parameters.

The rounds of local SGD (Stich, arXiv:1805.09767) and DiLoCo (Douillard et al., arXiv:2311.08105).
A round ends when every live worker has sent its result, so a worker that leaves opens it.
"""

from __future__ import annotations

from zmqtrain.policies.sync_replicas import Replicas

MAX_BATCHES = 1000
"""Most batches of a round: messages, and the memory of a ps, hold the number of each."""


class LocalSteps(Replicas):
    """Rounds of ``batches`` steps that each worker makes alone; before step ``after`` there are
    none, and each step is the mean of the workers' gradients, as under sync-replicas.
    """

    _each = "results"
    _step = "this round"

    def __init__(self, batches: int, after: int = 0) -> None:
        self.batches, self.after = batches, after
        self.start(0, 0)

    @property
    def spec(self) -> str:
        return f"local-steps:{self.batches}" + (f",after={self.after}" if self.after else "")

    def local_steps(self, step: int) -> int:
        """Return how many batches a worker computes alone from this step on, at most; 0: none."""
        return self.batches if step >= self.after else 0
