"""The global generators of a rank: nothing in the library draws from them, but a user's reward may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["derive_rng_state", "read_rng_state", "restore_rng_state"]


def read_rng_state() -> dict[str, Any]:
    """The generators of torch (CPU and this rank's GPU), numpy and python, as JSON values."""
    version, internal, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": [version, list(internal), gauss],
        "numpy": {
            **numpy_state,
            "state": {"key": numpy_state["state"]["key"].tolist(), "pos": numpy_state["state"]["pos"]},
        },
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set all generators to what `read_rng_state` read."""
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    inner = state["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": key, "pos": inner["pos"]}})


def derive_rng_state(seeds: Sequence[int]) -> None:
    """Seed all generators from (seed, step, rank): other numbers for each, the same after every start."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence(seeds).generate_state(3).tolist()
    torch.manual_seed(torch_seed)
    np.random.set_state(np.random.RandomState(numpy_seed).get_state(legacy=False))
    random.setstate(random.Random(python_seed).getstate())


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
