"""Pixels to floats, and an import that stays light."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import datapipe
from datapipe.collate import as_tensor, write_pixels


def test_pixels_go_from_minus_one_to_one() -> None:
    pixels = np.array([[[0, 255, 51]]], np.uint8)
    out = np.empty((3, 1, 1), np.float32)
    write_pixels(pixels, out)
    np.testing.assert_allclose(out.ravel(), [-1, 1, -0.6], atol=1e-6)


def test_tensors_share_memory() -> None:
    array = np.zeros(3, np.int32)
    tensor = as_tensor(array)
    tensor[0] = 7
    assert array[0] == 7 and tensor.dtype == torch.int32


def test_importing_the_package_loads_no_torch() -> None:
    script = "import sys, datapipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_public_names() -> None:
    for name in datapipe.__all__:
        assert getattr(datapipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'loadr'"):
        datapipe.loadr  # noqa: B018
