"""Start the chief: `python -m zmqtrain.roles.chief`."""

import sys

from zmqtrain.roles.start import start

if __name__ == "__main__":
    sys.exit(start("chief"))
