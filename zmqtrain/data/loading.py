"""Loading a job's data."""

from __future__ import annotations

from typing import Any

from zmqtrain.data.subset import Typed
from zmqtrain.errors import DataError
from zmqtrain.models.base import Data, Dataset
from zmqtrain.user_code import user_code


def load(data: Data, directory: str | None) -> tuple[Dataset, Dataset | None]:
    """Return the training set and the evaluation set, None if there is none.

    Raises:
        DataError: files are missing or damaged, or ``load()`` returns something else.
    """
    with user_code("load()", data, DataError):
        loaded: Any = data.load(directory)
    match loaded:
        case (Dataset() as training, (Dataset() | None) as evaluation):
            if evaluation is None:
                return Typed(training, data), None
            if not len(evaluation):  # a stream has no length; its error advises
                raise DataError("the evaluation set has 0 examples; expected at least 1, or no set")
            return Typed(training, data), Typed(evaluation)
    parts = loaded if isinstance(loaded, tuple) else ()
    kinds = f" of {[type(part).__name__ for part in parts]}" * bool(parts)
    raise DataError(
        f"load() of {data!r} returned a {type(loaded).__name__}{kinds}; expected (training set, "
        "evaluation set), each with __len__ and take(); for arrays use "
        "data=zmqtrain.data.Arrays(train=(X, y), evaluation=(X_test, y_test))"
    )
