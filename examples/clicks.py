"""Synthetic clicks in the shape of Criteo's data, with a known best AUC.

An example has numbers, an id for each column, and a label: whether there was a click. Ids are
distributed like the words of a language: the frequency of id k of a column is proportional to
(k + 1)^-zipf. The logit of a click is the sum of a hidden bias of each id, the products of the
hidden vectors of each pair of ids, and the weighted numbers, as in a factorisation machine (Rendle,
ICDM 2010). Hidden values are computed from column and id.

Making examples needs only NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992),
    *(5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CRITEO = tuple(min(rows, 100_000) for rows in _CRITEO)
"""Number of ids of each column of Criteo's Kaggle data, at most 100,000."""


@dataclass(frozen=True)
class Clicks:
    """Data of a job: ``numbers`` float32 (n, numbers), ids int64 (n, columns), clicks float32 (n,).

    ``rows``: number of ids of each column. ``examples`` and ``held_out``: of the training and the
    evaluation set. ``rank``: elements of a hidden vector. ``spread``: standard deviation of the
    logits; the larger it is, the better clicks can be predicted. ``numbers=0`` leaves the numbers
    out of a batch.
    """

    rows: tuple[int, ...] = CRITEO
    numbers: int = 13
    examples: int = 200_000
    held_out: int = 20_000
    zipf: float = 1.05
    rank: int = 4
    spread: float = 2.0
    click_rate: float = 0.25
    seed: int = 0

    def load(self, directory: str | None) -> tuple[Any, Any]:
        """Return both sets.

        Raises:
            DataError: a directory is given.
        """
        from zmqtrain.data import ArrayDataset
        from zmqtrain.errors import DataError

        if directory is not None:
            raise DataError(
                f"--data is {directory}, but these examples are synthetic; expected no directory: "
                "leave it out"
            )
        train, evaluation = self.arrays(self.examples, 0), self.arrays(self.held_out, 1)
        return ArrayDataset(*train), ArrayDataset(*evaluation)

    @property
    def best_auc(self) -> float:
        """Return the AUC of the true probabilities of clicks on the evaluation set."""
        numbers, ids = self._inputs(self.held_out, 1)
        return auc_of(self._logits(numbers, ids), self.arrays(self.held_out, 1)[-1])

    def arrays(self, examples: int, part: int) -> tuple[NDArray[Any], ...]:
        """Return a set's arrays; ``part`` is the number of the set."""
        numbers, ids = self._inputs(examples, part)
        chances = 1 / (1 + np.exp(-self._logits(numbers, ids)))
        clicks = self._random(part, 1).random(examples) < chances
        inputs = (numbers, ids) if self.numbers else (ids,)
        return *inputs, clicks.astype(np.float32)

    def _random(self, *stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, *stream]))

    def _inputs(self, examples: int, part: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        random = self._random(part, 0)
        numbers = random.standard_normal((examples, self.numbers), np.float32)
        ids = np.empty((examples, len(self.rows)), np.int64)
        for column, rows in enumerate(self.rows):
            places = np.searchsorted(shares(rows, self.zipf), random.random(examples))
            ids[:, column] = np.minimum(places, rows - 1)
        return numbers, ids

    def _logits(self, numbers: NDArray[np.float32], ids: NDArray[np.int64]) -> Floats:
        """Return the logits, shape (n,): three parts of equal variance, and a bias."""
        columns = ids.shape[1]
        biases = np.zeros(len(ids))
        vectors, squares = np.zeros((len(ids), self.rank)), np.zeros(len(ids))
        for column in range(columns):
            hidden = normal(ids[:, column], column + len(self.rows) * self.seed, 1 + self.rank)
            biases += hidden[:, 0]
            vectors += hidden[:, 1:]
            squares += np.square(hidden[:, 1:]).sum(axis=1)
        pairs = columns * (columns - 1) / 2
        products = (np.square(vectors).sum(axis=1) - squares) / 2
        parts = [biases / columns**0.5, products / max(1.0, pairs * self.rank) ** 0.5]
        if self.numbers:
            weights = self._random(2).standard_normal(self.numbers)
            parts.append(numbers @ (weights / np.linalg.norm(weights)))
        logits = sum(parts) * (self.spread / len(parts) ** 0.5)
        return np.asarray(logits + np.log(self.click_rate / (1 - self.click_rate)))


@lru_cache(maxsize=4)
def shares(rows: int, zipf: float) -> Floats:
    """Return the share of the ids up to each rank, shape (rows,)."""
    sums = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
    return np.asarray(sums / sums[-1])


def normal(ids: NDArray[np.int64], column: int, count: int) -> Floats:
    """Return random numbers of mean 0 and variance 1 for each id, shape (n, count).

    Each is a sum of four parts of a word of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(column * 1009)
    words = mixed(ids.view(np.uint64)[:, None] + mixed(places * golden))
    parts = words.view(np.uint16).reshape(len(ids), count, 4)
    centred = parts.sum(axis=2, dtype=np.float64) - 4 * (2**16 - 1) / 2
    return np.asarray(centred / (2**16 / 3**0.5))


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def auc_of(scores: Floats, clicks: NDArray[Any]) -> float:
    """Return the share of the pairs of a click and no click in which the click's score is larger.

    Equal scores count half: the Mann-Whitney statistic.
    """
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = clicks > 0
    found = int(positive.sum())
    pairs = found * (len(clicks) - found)
    return float((ranks[positive].sum() - found * (found + 1) / 2) / pairs)
