"""The package of job files whose own name is taken, as that of random.py or test.py is.

Such a file is the module ``zmqtrain.config.job_modules.random``. A process that the job starts, of
multiprocessing for instance, has the same ``sys.path`` and imports it from there.
"""

import sys

from zmqtrain.user_code import is_installed

__path__ = [directory for directory in sys.path if not is_installed(directory)]
