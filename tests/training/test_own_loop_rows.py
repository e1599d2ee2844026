"""The rows of tables in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.recommenders import make_job
from zmqtrain.errors import ConfigError, FencedError, PeerLostError, ZmqTrainError
from zmqtrain.models.tables import Ids, Rows
from zmqtrain.training.own_loop import RowsOfLoop


class Source:
    """Raises an error, or returns zeros."""

    may_wait = True

    def __init__(self, error: ZmqTrainError | None) -> None:
        self.error, self.is_closed = error, False

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        if self.error is not None:
            raise self.error
        return [np.zeros((len(ids), 3), np.float32) for _, ids in wanted]

    def close(self) -> None:
        self.is_closed = True


IDS = np.array([1, 7])


@pytest.mark.parametrize("error", [FencedError("a new life"), PeerLostError("it is gone"), None])
def test_loop_of_the_user_meets_no_error_of_a_lost_ps(error: ZmqTrainError | None) -> None:
    tables = make_job().table_variables()
    (rows,) = RowsOfLoop(Source(error), tables).read([(1, IDS)])
    expected = np.zeros((2, 3)) if error is None else tables[1].initial_rows(IDS)
    np.testing.assert_array_equal(rows, expected)


def test_loop_of_the_user_meets_other_errors() -> None:
    with pytest.raises(ConfigError, match="wrong"):
        RowsOfLoop(Source(ConfigError("wrong")), make_job().table_variables()).read([(0, IDS)])


def test_rows_of_a_loop_end_with_their_source() -> None:
    source = Source(None)
    rows = RowsOfLoop(source, make_job().table_variables())
    rows.close()
    assert source.is_closed and rows.may_wait
