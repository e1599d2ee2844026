"""Start a parameter server: `python -m zmqtrain.roles.ps`."""

from __future__ import annotations

import sys

from zmqtrain.config.cluster import Role
from zmqtrain.roles.launch import launch

if __name__ == "__main__":
    sys.exit(launch(Role.PS))
