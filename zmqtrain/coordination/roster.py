"""A roster: workers that make steps by themselves, in lockstep, until it ends.

The result is a function of the roster and the number of steps: in each step every worker counts its
oldest batch and gets the next number, in the roster's order. So the steps need no messages, and the
coordinator is updated at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.coordination.ledger import Ledger
from zmqtrain.policies import Policy
from zmqtrain.policies.base import Lockstep
from zmqtrain.protocol.orders import Roster
from zmqtrain.store.segment_layout import MAX_STEPS, SEATS


def roster_for(
    workers: Sequence[int], policy: Policy, ledger: Ledger, steps: int, lookahead: int
) -> Roster | None:
    """Return a roster of these workers, all of which were just answered; None if not possible.

    ``steps``: up to the end, or to the next evaluation. The coordinator itself makes the last step
    and the end of a pass.
    """
    count = len(workers)
    if not (isinstance(policy, Lockstep) and policy.is_level) or not 0 < count <= SEATS:
        return None
    held = [len(ledger.leases.get(worker, ())) for worker in workers]
    if ledger.returned or ledger.pending or any(each != 1 + lookahead for each in held):
        return None
    steps = min(steps - 1, MAX_STEPS)
    if ledger.limit is not None:
        steps = min(steps, (ledger.limit - ledger.next_batch) // count)
    return Roster(tuple(workers), steps, ledger.next_batch) if steps > 0 else None
