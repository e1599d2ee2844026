"""`python -m zmqtrain` is the `zmqtrain` command."""

import sys

from zmqtrain.cli.main import main

sys.exit(main())
