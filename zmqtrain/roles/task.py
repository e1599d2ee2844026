"""Start a task of the role that --role, ZMQTRAIN_ROLE or TF_CONFIG names:
`python -m zmqtrain.roles.task`."""

import sys

from zmqtrain.roles.start import start

if __name__ == "__main__":
    sys.exit(start(None))
