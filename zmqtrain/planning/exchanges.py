"""The registry of exchanges: how gradients become parameters.

A row has the obstacles to an exchange, the number of workers that hold shards if there are no ps,
and the number of tasks that hold each slice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from zmqtrain import policies
from zmqtrain.config.cluster import is_of_this_host
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job
from zmqtrain.policies.base import Lockstep
from zmqtrain.store.segment_files import can_be_shared
from zmqtrain.units import counted


@dataclass(frozen=True, slots=True)
class Site:
    """A job and the tasks that are to train it.

    ``addresses``: those of the ps; of the workers if these hold the parameters (``on_workers``).
    """

    job: Job
    workers: int
    addresses: tuple[str, ...]
    on_workers: bool
    lane: str = "auto"
    crash_safe: bool = True


@dataclass(frozen=True, slots=True)
class ExchangeKind:
    """One way from gradients to parameters.

    ``obstacles``: the obstacles to it at a site, as clauses of a sentence. ``shards``: how many
    workers hold shards without ps. ``copies``: holders of each slice, by number of shards.
    """

    name: str
    obstacles: Callable[[Site], list[str]]
    shards: Callable[[Site], int]
    copies: Callable[[Site, int], int]

    @property
    def is_board(self) -> bool:
        return self is BOARD


def exchange_at(site: Site) -> ExchangeKind:
    """Return the exchange that the job names, or the first without obstacles if it names none.

    Raises:
        ConfigError: the exchange or the copies that the job asks for are impossible here.
    """
    name = site.job.exchange
    if name in ("auto", "nccl"):  # nccl joins the devices of one worker
        candidates = [exchange for exchange in AUTOMATIC if not exchange.obstacles(site)]
        found = candidates[0] if candidates and site.on_workers else DIRECT
    else:
        found = EXCHANGES[name]
        if obstacles := found.obstacles(site):
            raise ConfigError(
                f"{names_of('exchange')} is {name}, but {'; '.join(obstacles)}; correct that, or "
                "use direct"
            )
    if site.job.copies > 1 and (obstacles := _obstacles_to_copies(site)):
        raise ConfigError(
            f"{names_of('copies')} is {site.job.copies}, but {'; '.join(obstacles)}; correct that, "
            "or leave it out"
        )
    return found


def _obstacles_to_board(site: Site) -> list[str]:
    job = site.job
    is_lockstep = isinstance(policies.make_policy(job.policy), Lockstep)
    found = {
        f"the policy is {job.policy} instead of sync-replicas": not is_lockstep,
        f"{job.optimizer!r} looks at whole variables": job.update().is_layered,
        "ps_device is gpu": job.ps_device == "gpu",
        "consistent_reads is on": job.consistent_reads,
        f"copies is {job.copies}": job.copies > 1,
        "lane is tcp": site.lane == "tcp",
        "crash_safe is off": not site.crash_safe,
        f"{sys.platform} cannot share memory in files": not can_be_shared(),
    }
    far = [address for address in site.addresses if not is_of_this_host(address)]
    return [
        *(obstacle for obstacle, is_there in found.items() if is_there),
        *(f"{address} may be on another host" for address in far),
        *_more_than_one_ps(site),
    ]


def _more_than_one_ps(site: Site) -> list[str]:
    ps = len(site.addresses)
    return [f"there are {ps} ps instead of one"] if ps > 1 and not site.on_workers else []


def _obstacles_to_copies(site: Site) -> list[str]:
    """Return the obstacles to equal copies of a slice on several tasks."""
    job = site.job
    if not site.on_workers:
        return ["there are ps; expected workers that hold the parameters (--ps 0)"]
    found = {
        f"there {'is' if site.workers == 1 else 'are'} {counted(site.workers, 'worker')}": (
            job.copies > site.workers
        ),
        f"by the policy {job.policy} each part decides alone (hogwild:whole does not)": (
            not policies.make_policy(job.policy).coordinated
        ),
        f"compression is {job.compression}": job.compression != "none",
        "ps_device is gpu": job.ps_device == "gpu",
    }
    return [obstacle for obstacle, is_there in found.items() if is_there]


def _fewest(site: Site) -> int:
    return min(site.job.copies, site.workers)


def _by_size(site: Site) -> int:
    """Return how many workers hold shards of ``partition_nbytes`` or more.

    A step that needs more workers to agree takes longer, and smaller shards save less than that.
    Tables are on all of them, because their size is unknown.
    """
    if site.job.table_variables():
        return site.workers
    least = site.job.partition_nbytes
    nbytes = sum(variable.nbytes for variable in site.job.variables())
    most = nbytes // least if least else site.workers
    return max(_fewest(site), min(site.workers, most))


def _copies(site: Site, shards: int) -> int:
    return min(site.job.copies, shards)


BOARD = ExchangeKind(
    "board", obstacles=_obstacles_to_board, shards=lambda site: 1, copies=lambda site, shards: 1
)
DIRECT = ExchangeKind("direct", obstacles=lambda site: [], shards=_by_size, copies=_copies)
TO_ONE = ExchangeKind("to-one", obstacles=_more_than_one_ps, shards=_fewest, copies=_copies)
ONE_SHOT = ExchangeKind(
    "one-shot",
    obstacles=_obstacles_to_copies,
    shards=lambda site: site.workers,
    copies=lambda site, shards: shards,
)

EXCHANGES = {exchange.name: exchange for exchange in (BOARD, DIRECT, TO_ONE, ONE_SHOT)}
"""All exchanges by the name that --exchange gives them."""

AUTOMATIC = (BOARD, DIRECT)
"""The candidates of --exchange auto where workers hold the parameters, in order of preference."""
