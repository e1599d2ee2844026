"""A Ray cluster of several raylets on this machine, driven through its stdin.

Prints its address. "remove PID" ends the raylet of that process, "end" and the end of stdin all.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODES = 3

if __name__ == "__main__":
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=2) for _ in range(NODES)]
    cluster.wait_for_nodes()
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, _, pid = line.strip().partition(" ")
        if verb != "remove":
            break
        for node in nodes:
            if int(pid) in [info.process.pid for info in node.all_processes["raylet"]]:
                cluster.remove_node(node, allow_graceful=False)
                sys.stdout.write("removed\n")
                sys.stdout.flush()
    cluster.shutdown()
