"""The synthetic clicks of the recommenders, and the files of MovieLens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.clicks import Clicks, auc_of
from zmqtrain.errors import DataError

SMALL = Clicks(rows=(1000, 3), examples=500, held_out=2000)
HEAD = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
RATINGS = "".join(f"{user}\t{300 + user}\t{1 + user % 5}\t0\n" for user in range(1, 21))


@pytest.fixture
def movielens(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from movielens import MovieLens

    return lambda directory: MovieLens().load(directory)


def test_clicks_are_the_same_for_the_same_seed() -> None:
    once, again, other = (of.arrays(500, 0) for of in (SMALL, SMALL, Clicks((1000, 3), seed=1)))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
    assert not np.array_equal(once[1], other[1])


def test_ids_are_of_their_columns_and_as_frequent_as_their_ranks() -> None:
    _, ids, clicks = SMALL.arrays(20_000, 0)
    assert ids.min() == 0
    assert (ids.max(axis=0) < (1000, 3)).all()
    counts = np.bincount(ids[:, 0])
    assert counts[0] / counts[1] == pytest.approx(2**1.05, rel=0.1)
    assert set(clicks) == {0, 1}


def test_no_scores_beat_the_best_auc() -> None:
    numbers, ids, clicks = SMALL.arrays(2000, 1)
    assert 0.8 < SMALL.best_auc < 0.95
    assert all(auc_of(score, clicks) < SMALL.best_auc for score in (*numbers.T, -ids[:, 1]))


def test_auc_is_the_share_of_pairs_in_order() -> None:
    random = np.random.default_rng(0)
    scores, clicks = random.integers(0, 9, 200).astype(float), random.integers(0, 2, 200)
    pairs = scores[clicks == 1][:, None] - scores[clicks == 0]
    assert auc_of(scores, clicks) == pytest.approx(np.mean((1 + np.sign(pairs)) / 2))


def test_synthetic_clicks_take_no_directory() -> None:
    with pytest.raises(DataError, match="synthetic"):
        SMALL.load("/data")


def test_ratings_of_four_stars_are_likes(movielens: Any, tmp_path: Path) -> None:
    (tmp_path / "ml-100k.inter").write_text(HEAD + RATINGS)
    train, evaluation = movielens(str(tmp_path))
    assert (len(train), len(evaluation)) == (18, 2)
    ids, likes = train.take(np.arange(18))
    assert ids.dtype == np.int64
    assert (ids[:, 1] == 300 + ids[:, 0]).all()
    assert (likes == (ids[:, 0] % 5 >= 3)).all()


@pytest.mark.parametrize(
    "text", [None, "user_id:token\trating:float\n1\t2\n", HEAD + "1\tx\t3\t0\n"]
)
def test_other_files_are_refused(movielens: Any, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "ml-100k.inter").write_text(text)
    with pytest.raises(DataError, match=r"ml-100k\.inter cannot be read"):
        movielens(str(tmp_path))
