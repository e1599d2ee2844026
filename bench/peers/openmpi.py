"""Open MPI by mpi4py: two ranks that reduce among themselves, without an update.

The script starts itself again under mpirun. Ranks wait by looking, so each needs a core to itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from bench.hosts import INTERFACE
from bench.peers import shared
from bench.workload import Row

RANKS = 2
RANK = "OMPI_COMM_WORLD_RANK"  # set by mpirun
BY_TCP = f"--mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include {INTERFACE}".split()


def push_pull(arguments: argparse.Namespace) -> list[Row]:
    """Time all-reduces of an array of the given size, in place; rank 0 tells."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def exchange_for(traffic: shared.Traffic) -> shared.Step:
        def exchange() -> object:
            world.Allreduce(MPI.IN_PLACE, traffic.gradient)
            return traffic.gradient

        return exchange

    rows = shared.push_pull_rows("openmpi", arguments, exchange_for, workers=RANKS, ps=0)
    return rows if world.rank == 0 else []


def mpirun(python: Path, arguments: Sequence[str], namespaces: Sequence[str] = ()) -> list[str]:
    """Return the command that starts all ranks of this script.

    ``namespaces``: a network for each rank (see bench.hosts); then they reduce by tcp alone.
    """
    settings = [f"OMPI_ALLOW_RUN_AS_ROOT{end}=1" for end in ("", "_CONFIRM")]
    program = ["env", *settings, str(python.with_name("mpirun"))]
    script = [str(python), "-m", "bench.peers.openmpi", *arguments]
    if not namespaces:
        return [*program, "-n", str(RANKS), *script]
    program.insert(1, f"PMIX_MCA_ptl_base_if_include={INTERFACE}")  # where ranks find mpirun
    inside = ("ip", "netns", "exec")
    ranks = [(":", "-n", "1", *inside, namespace, *script) for namespace in namespaces]
    return [*inside, namespaces[0], *program, *BY_TCP, *list(chain(*ranks))[1:]]


def main() -> None:
    if RANK in os.environ or "--help" in sys.argv:
        shared.run(push_pull)
        return
    command = mpirun(Path(sys.executable), sys.argv[1:])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
