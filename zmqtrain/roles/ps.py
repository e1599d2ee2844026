"""Start a parameter server: `python -m zmqtrain.roles.ps`."""

import sys

from zmqtrain.roles.start import start

if __name__ == "__main__":
    sys.exit(start("ps"))
