"""Start the chief: `python -m zmqtrain.roles.chief`."""

from __future__ import annotations

import sys

from zmqtrain.config.cluster import Role
from zmqtrain.roles.launch import launch

if __name__ == "__main__":
    sys.exit(launch(Role.CHIEF))
