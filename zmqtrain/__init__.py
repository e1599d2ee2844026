"""zmqtrain: a parameter-server training engine.

``Job`` says what is trained, ``run`` trains it inside this process; `zmqtrain run`, the roles and
honcho train it in processes of their own.
"""

from importlib.metadata import version

from zmqtrain.job import Job
from zmqtrain.local import run
from zmqtrain.summary import Summary

__all__ = ["Job", "Summary", "__version__", "run"]

__version__ = version("zmqtrain")
