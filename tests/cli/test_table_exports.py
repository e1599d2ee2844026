"""Tables out of a run: `zmqtrain export --table`, and `zmqtrain.load`."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

import zmqtrain
from tests.constants import Constants
from tests.modules import Modules
from tests.recommenders import DIM, ITEMS, USERS, Recommender, make_job
from zmqtrain.cli.main import main
from zmqtrain.errors import CheckpointError, ConfigError, ExitCode
from zmqtrain.models.rows import TableReader
from zmqtrain.models.tables import Given, Normal, Table
from zmqtrain.optim import SGD
from zmqtrain.store import saved_rows

FORMATS = ["npz", "safetensors", *(["parquet"] if find_spec("pyarrow") else [])]
EVERY = np.arange(USERS + ITEMS)


@pytest.fixture(autouse=True)
def _small_blocks(constants: Constants) -> None:
    constants(saved_rows, CHUNK=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train on 2 ps, with checkpoints at steps 3, 6 and 9; items are forgotten. Return logdir and
    summary."""
    logdir = tmp_path_factory.mktemp("logdir")
    options: Any = {"tables": {"item": Table(max_rows=12)}, "policy": "sync-replicas"}
    for steps in (3, 6, 9):
        job = make_job(Recommender(items=None), logdir=str(logdir), steps=steps, **options)
        summary = zmqtrain.run(job, ps=2, workers=1)
    return logdir, summary


def export(logdir: Path, to: Path, *options: str, table: str = "item") -> int:
    return main(["export", str(logdir), "--table", table, "--to", str(to), *options])


def read(path: Path) -> dict[str, Any]:
    """Return what an export of any format holds."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    table = import_module("pyarrow.parquet").read_table(path)
    is_null = table["row"].is_null().to_numpy(zero_copy_only=False)
    ids, rows = table["id"].to_numpy(), table.filter(table["row"].is_valid())["row"]
    dtype = table.schema.field("row").type.value_type.to_pandas_dtype()
    found = {
        "ids": ids[~is_null],
        "rows": np.array(rows.to_pylist(), dtype).reshape(-1, DIM),
        "step": np.array(int(table.schema.metadata[b"step"])),
    }
    return found | ({"forgotten": ids[is_null]} if is_null.any() else {})


def served(export: dict[str, Any]) -> dict[int, bytes]:
    return dict(zip(export["ids"].tolist(), (row.tobytes() for row in export["rows"]), strict=True))


def test_loaded_tables_are_those_of_the_run(trained: Any) -> None:
    logdir, summary = trained
    weights = zmqtrain.load(logdir)
    expected = summary.parameters["user"].take(np.arange(USERS))
    np.testing.assert_array_equal(weights["user"], expected)
    item = weights["item"]
    assert isinstance(item, TableReader)
    assert item.trained is not None
    assert len(item.trained.ids) == summary.tables["item"]["trained"]
    np.testing.assert_array_equal(item.take(item.trained.ids), item.trained.rows)
    job = make_job(Recommender(items=None))
    (variable,) = (table for table in job.table_variables() if table.name == "item")
    others = np.setdiff1d(EVERY, item.trained.ids)
    np.testing.assert_array_equal(item.take(others), variable.initial_rows(others))


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exported_rows_are_the_trained_ones(
    trained: Any, ending: str, dtype: str, tmp_path: Path
) -> None:
    file = tmp_path / "new" / f"item.{ending}"
    assert export(trained[0], file, "--dtype", dtype) == 0
    assert export(trained[0], file, "--dtype", dtype) == 0  # in place of the first
    found, of = read(file), zmqtrain.load(trained[0])["item"].trained
    np.testing.assert_array_equal(found["ids"], of.ids)
    np.testing.assert_array_equal(found["rows"], of.rows.astype(dtype))
    assert (found["rows"].dtype, found["step"]) == (dtype, 9)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("ending", FORMATS)
def test_earlier_export_and_what_changed_since_are_the_later_one(
    trained: Any, ending: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"{n}.{ending}" for n in range(3)]
    options = ["--since", "0", "--step", "3"], ["--since", "3"], []
    for file, given in zip(files, options, strict=True):
        assert export(trained[0], file, *given) == 0
    before, changes, after = map(read, files)
    assert before["step"] == 3
    assert 0 < len(changes["ids"]) <= len(after["ids"])
    assert len(changes["forgotten"]), "no item was forgotten"
    rows = served(before) | served(changes)
    for id_ in changes["forgotten"].tolist():
        del rows[id_]
    assert rows == served(after)


def test_export_since_the_newest_checkpoint_is_empty(trained: Any, tmp_path: Path) -> None:
    for ending in FORMATS:
        assert export(trained[0], tmp_path / f"x.{ending}", "--since", "9") == 0
        found = read(tmp_path / f"x.{ending}")
        assert (len(found["ids"]), found["rows"].shape) == (0, (0, DIM))


def test_export_of_fewer_rows_keeps_those_trained_last(trained: Any, tmp_path: Path) -> None:
    assert export(trained[0], tmp_path / "changes.npz", "--since", "6", table="user") == 0
    last = read(tmp_path / "changes.npz")["ids"]
    assert export(trained[0], tmp_path / "x.npz", "--max-rows", str(len(last)), table="user") == 0
    np.testing.assert_array_equal(read(tmp_path / "x.npz")["ids"], last)


MISTAKES = {
    "table": (["--table", "ad"], r"no table 'ad'; its tables: user, item"),
    "step": (["--step", "4"], "no checkpoint of step 4; .* 9, 6, 3"),
    "since": (["--since", "4"], "no checkpoint of step 4"),
    "later": (["--since", "6", "--step", "3"], "nothing in it is later than step 6"),
    "ending": (["--to", "x.csv"], r"ends with \.safetensors, \.npz or \.parquet"),
    "average": (["--average"], "tables have no moving averages"),
}


@pytest.mark.parametrize(("options", "text"), MISTAKES.values(), ids=MISTAKES)
def test_export_that_cannot_be_is_refused(
    trained: Any, options: list[str], text: str, tmp_path: Path, capsys: Any
) -> None:
    assert export(trained[0], tmp_path / "x.npz", *options) != 0
    assert re.search(text, " ".join(capsys.readouterr().err.split()))
    assert not [*tmp_path.iterdir()]


def test_options_of_a_table_need_its_name(trained: Any, tmp_path: Path, capsys: Any) -> None:
    arguments = ["export", str(trained[0]), "--to", str(tmp_path / "x.npz"), "--since", "3"]
    assert main(arguments) == ExitCode.USAGE
    assert "--since: expected --table NAME, too" in capsys.readouterr().err


def test_parquet_without_pyarrow_is_refused_with_its_extra(
    trained: Any, tmp_path: Path, modules: Modules, capsys: Any
) -> None:
    modules("pyarrow.parquet", None)
    assert export(trained[0], tmp_path / "x.parquet") == ExitCode.USAGE
    assert "zmqtrain[data]" in capsys.readouterr().err


def test_export_without_a_table_names_those_that_it_leaves_out(
    trained: Any, tmp_path: Path, capsys: Any
) -> None:
    assert main(["export", str(trained[0]), "--to", str(tmp_path / "x.npz")]) == 0
    assert "1 variable; tables are left out, see --table: user, item" in capsys.readouterr().out
    job = make_job(initial=str(tmp_path / "x.npz"))
    np.testing.assert_array_equal(job.all_values()["bias"], zmqtrain.load(trained[0])["bias"])


class Others(Recommender):
    """A recommender whose rows begin as an array and by a class of its own."""

    class Sevens:
        def rows(self, key: int, ids: Any, dim: int) -> Any:
            return np.full((len(ids), dim), 7e5, np.float32)

    given = np.random.default_rng(1).standard_normal((USERS, DIM), np.float32)

    def tables(self, seed: int) -> dict[str, Table]:
        user = Table(dim=DIM, rows=USERS, initial=Given(self.given))
        return {"user": user, "item": Table(dim=DIM, rows=ITEMS, initial=self.Sevens())}


def test_array_with_which_a_table_began_is_in_its_checkpoints_once(tmp_path: Path) -> None:
    zmqtrain.run(make_job(Others(), steps=2, logdir=str(tmp_path), save_steps=1))
    weights = zmqtrain.load(tmp_path)
    untrained = np.setdiff1d(np.arange(USERS), weights_of(tmp_path, "user"))
    assert len(untrained)
    np.testing.assert_array_equal(weights["user"][untrained], Others.given[untrained])
    files = [path.stat().st_ino for path in tmp_path.glob("checkpoints/step-*/frozen*")]
    assert files == 2 * files[:1]


def weights_of(logdir: Path, table: str) -> Any:
    """Return the ids of the trained rows of a table."""
    file = logdir / "ids.npz"
    assert export(logdir, file, table=table) == 0
    return read(file)["ids"]


def test_rows_whose_initial_values_no_checkpoint_has_are_refused(tmp_path: Path) -> None:
    job: Any = {"logdir": str(tmp_path), "optimizer": SGD(1e-30)}
    zmqtrain.run(make_job(Others(), steps=1, **job))
    item = zmqtrain.load(tmp_path)["item"]
    np.testing.assert_array_equal(item.take(item.trained.ids), item.trained.rows)
    with pytest.raises(ConfigError, match=r"no row for \d+ of the ids, .*a class of the job's own"):
        item.take(np.arange(ITEMS))


def test_row_too_large_for_float16_is_refused(tmp_path: Path, capsys: Any) -> None:
    job: Any = {"logdir": str(tmp_path), "optimizer": SGD(1e-30)}
    zmqtrain.run(make_job(Others(), steps=1, **job))
    assert export(tmp_path, tmp_path / "x.npz", "--dtype", "float16") != 0
    assert "expected at most 65504 for float16" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.npz").exists()


def test_table_that_does_not_fit_into_memory_is_refused(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: few)
    with pytest.raises(CheckpointError, match=r"'user' has 40 rows of 3, 480 B; this host has 100"):
        zmqtrain.load(trained[0])


def test_table_of_normal_initial_values_is_loaded_with_them(tmp_path: Path) -> None:
    tables = {"user": Table(initial=Normal(2.0))}
    job = make_job(steps=1, logdir=str(tmp_path), tables=tables)
    expected = zmqtrain.run(job).parameters["user"].take(np.arange(USERS))
    np.testing.assert_array_equal(zmqtrain.load(tmp_path)["user"], expected)
