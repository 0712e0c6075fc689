"""Which piece of every tensor a rank holds, and how pieces of any cut are put together again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unirl.errors import CheckpointError
from unirl.trainer.host_copy import DTYPES

__all__ = [
    "PIECES",
    "Piece",
    "PieceReader",
    "model_tensors",
    "optimizer_tensors",
    "piece_of",
    "written_pieces",
]

PIECES = "pieces"
"""Key of a file's metadata: for each tensor that is a piece, the shape of the whole and where it lies."""

TYPES = {code: dtype for dtype, code in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank holds of one tensor."""

    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Of `local` in the whole."""
    is_first: bool
    """Whether no rank before this one holds the same."""


def piece_of(tensor: Tensor, *, is_main: bool) -> Piece:
    """Say what a rank holds: all of a plain tensor, its own part of a sharded one."""
    if not isinstance(tensor, DTensor):
        return Piece(local=tensor, shape=tuple(tensor.shape), offset=(0,) * tensor.ndim, is_first=is_main)
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    place = mesh.get_coordinate() or ()
    is_first = all(
        index == 0 for index, placement in zip(place, tensor.placements) if placement.is_replicate()
    )
    return Piece(local=tensor.to_local(), shape=tuple(tensor.shape), offset=tuple(offset), is_first=is_first)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that stands under two names only under the first."""
    found: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), name)
    return {name: tensors[name] for name in found.values()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps for each parameter, as `<name>:<field>`."""
    return {
        f"{name}:{field}": value
        for name, parameter in model_tensors(model).items()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def written_pieces(
    tensors: Mapping[str, Tensor], *, is_main: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What this rank writes, and the metadata that says where it belongs. Every number is written once."""
    pieces = {name: piece_of(tensor, is_main=is_main) for name, tensor in tensors.items()}
    written = {name: p for name, p in pieces.items() if p.is_first and (p.local.numel() or not prod(p.shape))}
    cut = {
        name: {"shape": piece.shape, "offset": piece.offset}
        for name, piece in written.items()
        if tuple(piece.local.shape) != piece.shape
    }
    metadata = {PIECES: json.dumps(cut)} if cut else {}
    return {name: piece.local.detach() for name, piece in written.items()}, metadata


class PieceReader:
    """Reads tensors out of files that hold them whole or in pieces. Use it in a `with` block.

    Raises:
        CheckpointError: On entry, if a file is no safetensors file.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = files
        self._places: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of whole tensors, by name."""
        self.dtypes: dict[str, torch.dtype] = {}

    def __enter__(self) -> PieceReader:
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    file = stack.enter_context(safe_open(path, framework="pt"))
                except SafetensorError as error:
                    raise CheckpointError(f"{path}: no safetensors file ({error})") from error
                cut = json.loads((file.metadata() or {}).get(PIECES, "{}"))
                for name in file.keys():  # noqa: SIM118, the file is no mapping
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    place = cut.get(name, {"shape": shape, "offset": (0,) * len(shape)})
                    self.shapes[name] = tuple(place["shape"])
                    self.dtypes[name] = TYPES[part.get_dtype()]
                    self._places.setdefault(name, []).append((file, tuple(place["offset"])))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, name: str, piece: Piece) -> None:
        """Put what the files say of a piece into its tensor.

        Raises:
            CheckpointError: If the whole has another shape there, or a part of the piece is missing.
        """
        if name not in self.shapes:
            raise CheckpointError(f"{name} is missing")
        if self.shapes[name] != piece.shape:
            raise CheckpointError(f"{name} is {list(self.shapes[name])} there and {list(piece.shape)} here")
        filled = 0
        for file, offset in self._places[name]:
            part = file.get_slice(name)
            size = part.get_shape()
            overlap = _overlap(offset, size, piece.offset, piece.local.shape)
            if overlap is None:
                continue
            source, target = overlap
            # A scalar has nothing to slice.
            values = part[source] if size else file.get_tensor(name)
            with torch.no_grad():
                piece.local[target].copy_(values)
            filled += values.numel()
        if filled != piece.local.numel():
            raise CheckpointError(f"{name}: {piece.local.numel()} numbers are needed, {filled} found")


Box = tuple[slice, ...]


def _overlap(
    offset: Sequence[int], size: Sequence[int], other_offset: Sequence[int], other_size: Sequence[int]
) -> tuple[Box, Box] | None:
    """Where two boxes of one whole meet, in the first's own places and in the second's."""
    starts = [max(pair) for pair in zip(offset, other_offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offset, size, other_offset, other_size, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return _box(starts, ends, offset), _box(starts, ends, other_offset)


def _box(starts: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> Box:
    return tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offset, strict=True))
