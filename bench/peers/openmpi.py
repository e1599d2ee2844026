"""Open MPI by mpi4py: two ranks that reduce among themselves, without an update.

The script starts itself again under mpirun. Ranks wait by looking, so each needs a core to itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.peers import shared
from bench.workload import Row

RANKS = 2
RANK = "OMPI_COMM_WORLD_RANK"  # set by mpirun


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


def main() -> None:
    if RANK in os.environ or "--help" in sys.argv:
        shared.run(push_pull)
        return
    program = str(Path(sys.executable).with_name("mpirun"))
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [program, "-n", str(RANKS), sys.executable, "-m", "bench.peers.openmpi"]
    os.execve(program, [*command, *sys.argv[1:]], os.environ | as_root)


if __name__ == "__main__":
    main()
