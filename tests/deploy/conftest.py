from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def queries() -> ModuleType:
    """The helper beside this file; test modules of this suite are not on the import path."""
    path = Path(__file__).with_name("queries.py")
    spec = importlib.util.spec_from_file_location("deploy_queries", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
