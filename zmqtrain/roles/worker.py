"""Start a worker: `python -m zmqtrain.roles.worker`."""

import sys

from zmqtrain.roles.start import start

if __name__ == "__main__":
    sys.exit(start("worker"))
