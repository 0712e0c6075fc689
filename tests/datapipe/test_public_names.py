"""The public names of datapipe: all there, none a module, and loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import datapipe
from storage import FeatureStore


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


def test_loading_batches_imports_neither_pandas_nor_masked_arrays(tmp_path: Path) -> None:
    """They take memory and most of the time of the first batch. Converters of pyarrow and `numpy.unique`
    import them in passing."""
    store = FeatureStore.create(tmp_path / "store")
    store.append({"key": f"{index}", "caption": "x", "width": index} for index in range(8))
    program = (
        "import sys; from datapipe import Loader; from storage import FeatureStore;"
        "view = FeatureStore.open(sys.argv[1]).select();"
        "list(Loader(view, batch_size=4, image=None, columns=('caption', 'width')));"
        "assert not {'pandas', 'numpy.ma', 'pyarrow.compute'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", program, str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
