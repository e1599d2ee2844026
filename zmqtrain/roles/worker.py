"""Start a worker: `python -m zmqtrain.roles.worker`."""

from __future__ import annotations

import sys

from zmqtrain.config.cluster import Role
from zmqtrain.roles.launch import launch

if __name__ == "__main__":
    sys.exit(launch(Role.WORKER))
