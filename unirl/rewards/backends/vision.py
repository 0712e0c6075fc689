"""The vision side of Qwen2.5-VL: media cut into patches, and what the tower derives from their sizes.

Media of one size share everything that depends on sizes only (rotary positions, attention segments), so it is
worked out once a size and handed to transformers' public forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

__all__ = ["PACKED_ATTENTION", "Grid", "VisionLayout", "patches"]

PACKED_ATTENTION = "unirl_packed_flash"
Grid = tuple[int, int, int]
"""Patches along time, rows and columns."""


def patches(clips: np.ndarray, vision: Any, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Cut uint8 (N, F, H, W, 3) into float32 (N * patches, values), as Qwen2VLImageProcessor does.

    Patches are ordered by the merged token that they belong to; the values of a patch are channel, frame,
    row, column. The last frame is repeated until the frames fill their patches.
    """
    frames, merge, side = vision.temporal_patch_size, vision.spatial_merge_size, vision.patch_size
    pixels = torch.from_numpy(clips).float()
    pixels = (pixels - 255 * torch.tensor(mean)) / (255 * torch.tensor(deviation))
    num, length, rows, columns = pixels.shape[:4]
    missing = -length % frames
    pixels = torch.cat([pixels, pixels[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1) if missing else pixels
    cell = merge * side
    cells = pixels.view(num, -1, frames, rows // cell, merge, side, columns // cell, merge, side, 3)
    cells = cells.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
    return cells.reshape(-1, 3 * frames * side * side)


class VisionLayout:
    """What the vision tower derives from one grid, made once and repeated for a batch."""

    def __init__(self, grid: Grid, vision: Any) -> None:
        one = torch.tensor([grid])
        self.grid = grid
        self.num_patches = math.prod(grid)
        self.num_tokens = self.num_patches // vision.spatial_merge_size**2
        self._positions = get_vision_position_ids(one, vision.spatial_merge_size)
        self._window_index, ends = get_vision_window_index(
            one, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        self._window_ends = ends.unique_consecutive()
        self._frame = grid[1] * grid[2]

    def repeated(self, num: int, device: torch.device) -> dict[str, Tensor | int]:
        """Arguments of `get_image_features` for `num` media of this grid."""
        offsets = torch.arange(num)[:, None]
        ends = (self._window_ends[1:] + offsets * self.num_patches).flatten()
        layout: dict[str, Tensor | int] = {
            "image_position_ids": self._positions.repeat(num, 1),
            "image_cu_seqlens": torch.arange(0, self.num_patches * num + 1, self._frame, dtype=torch.int32),
            "image_max_seqlen": self._frame,
            "image_window_index": (self._window_index + offsets * len(self._window_index)).flatten(),
            "image_cu_window_seqlens": torch.cat([ends.new_zeros(1), ends]).int(),
            "image_max_window_seqlen": int(self._window_ends.diff().max()),
        }
        return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in layout.items()}


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention inside segments of patches: all at once where they have one length, else one by one.

    (1, heads, U * n, d) -> (1, U * n, heads, d). transformers' own loop calls the kernel once a segment; it
    hands whole segments only to implementations whose name says "flash".
    """
    query, key, value = query[0], key[0], value[0]
    if (len(cu_seq_lens_q) - 1) * max_length_q == query.shape[1]:
        query, key, value = (p.unflatten(1, (-1, max_length_q)).transpose(0, 1) for p in (query, key, value))
        mixed = scaled_dot_product_attention(query, key, value, scale=scaling)
        return mixed.transpose(1, 2).flatten(0, 1).unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    segments = zip(*(part.split(lengths, dim=1) for part in (query, key, value)))
    mixed = torch.cat([scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in segments], dim=1)
    return mixed.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
