"""Users and the films that they like: MovieLens-100k in the files of recbole, or synthetic ones.

The files are in the wheel of recbole 1.2.1, in the folder recbole/dataset_example/ml-100k. The
terms of MovieLens do not allow us to distribute them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clicks import Clicks

from zmqtrain.data import ArrayDataset, split
from zmqtrain.errors import DataError

RATINGS = "ml-100k.inter"
COLUMNS = "user_id", "item_id", "rating"
LIKED = 4.0  # stars
SYNTHETIC = Clicks(
    rows=(5000, 1000), numbers=0, examples=200_000, held_out=20_000, zipf=0.8, click_rate=0.5
)


@dataclass(frozen=True)
class MovieLens:
    """Data of a job: ids of users and films, int64 (n, 2), and likes, float32 (n,).

    The file ``ml-100k.inter`` in the directory of ``--data`` contains them; a tenth is held out.
    Without a directory they are synthetic.
    """

    def load(self, directory: str | None) -> tuple[ArrayDataset, ArrayDataset]:
        """Return both sets.

        Raises:
            DataError: the file is missing or has other columns.
        """
        if directory is None:
            return SYNTHETIC.load(None)
        path = Path(directory, RATINGS)
        try:
            with path.open(encoding="utf-8") as file:
                names = [name.partition(":")[0] for name in file.readline().strip().split("\t")]
                columns = [names.index(name) for name in COLUMNS]
                values = np.loadtxt(file, delimiter="\t", usecols=columns, ndmin=2)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}; expected the file of recbole's MovieLens-100k, "
                f"with the columns {', '.join(COLUMNS)}: give its directory with --data"
            ) from error
        ids, likes = values[:, :2].astype(np.int64), (values[:, 2] >= LIKED).astype(np.float32)
        return split((ids, likes), 0.1, seed=0)
