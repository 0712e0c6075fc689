"""The public names of datapipe: all there, none a module, and loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import datapipe


def test_every_public_name_is_there_and_is_no_module() -> None:
    for name in datapipe.__all__:
        assert not isinstance(getattr(datapipe, name), ModuleType), name
    assert set(datapipe.__all__) <= set(dir(datapipe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Loadr'"):
        _ = datapipe.Loadr  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy_and_leaves_collection_on() -> None:
    program = (
        "import gc, sys, datapipe;"
        "assert not {'torch', 'pyarrow', 'storage', 'PIL'} & set(sys.modules);"
        "datapipe.ingest, datapipe.retry; assert 'torch' not in sys.modules;"
        "datapipe.Loader; assert gc.isenabled()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
