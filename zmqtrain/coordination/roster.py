"""A roster: workers that make steps by themselves, in lockstep, until it ends.

What they make is a function of the roster and the number of steps: with each, every worker counts
its oldest batch and is given the next number, in the roster's order. So nothing has to be asked or
noted on the way, and the coordinator is brought up to date at once.
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
    """Return a roster of these workers, all of which were just answered; None: none is possible.

    ``steps``: those up to the end, or to the next evaluation. The last one, and the end of a pass,
    are left to the coordinator.
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
