"""Two nodes of Ray on this machine: python -m chaos_ray. Prints ADDRESS; each line on stdin is an order: `lose` ends the second
node at once, `add` starts another, and the end of stdin ends all."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    node = cluster.add_node(**NODE)
    print("ADDRESS", cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            cluster.remove_node(node, allow_graceful=False)
        else:
            node = cluster.add_node(**NODE)
        print("DONE", line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
