"""Decoding for Llama-like models on preallocated buffers, without the model's own classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from unirl.policies.padding import token_positions
from unirl.policies.policy import Policy
from unirl.rollout.cache_memory import cache_zeros
from unirl.rollout.decoder import Prefix
from unirl.rollout.fused_weights import FusedLayer, FusedWeights
from unirl.rollout.weight_copies import WeightCopies
from unirl.types import Direction

__all__ = ["FusedDecoder"]

BLOCK_ROWS = 8
"""Rows of one block where rows of unequal length attend apart from each other."""
BLOCKS_PAY = 0.8
"""Share of the columns that blocks may read at most to be worth their calls."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries (M, heads, W), keys and values (M, kv heads, W)) of M tokens -> (M, heads * W)."""


class FusedDecoder:
    """Llama, Qwen2 and Qwen3: fused projections, a static cache, attention over its used columns alone."""

    def __init__(self, policy: Policy, *, dtype: torch.dtype, compile: bool = False) -> None:
        """Make the buffers.

        Args:
            policy: Gives the sizes, the device and the rotary embedding.
            dtype: Of weights and cache.
            compile: Compile a layer's matrix part with `torch.compile`.
        """
        self.dtype = dtype
        self._take_device(policy)
        self._before, self._after = _before_attention, _after_attention
        if compile:
            self._before = torch.compile(_before_attention, dynamic=True)
            self._after = torch.compile(_after_attention, dynamic=True)
        self._scale = self.weights.head_width**-0.5
        self._softmax_dtype = torch.promote_types(dtype, torch.float32)
        self._clock = 0
        self._num_rows = 0

    @property
    def copies(self) -> WeightCopies:
        """The weights, as they arrived with the last `sync`."""
        return self.weights.copies

    def sync(self, policy: Policy) -> None:
        """Copy the policy's weights, LoRA merged; a tied head follows its embedding."""
        if policy.device != self.device:
            self._take_device(policy)
        self.copies.load(policy.weights())

    def require_same(self, policy: Policy) -> None:
        """Compare all weights, LoRA merged."""
        self.copies.require_same(policy.weights())

    def _take_device(self, policy: Policy) -> None:
        """Make the buffers where the policy is: a trainer may move it after its engine was made."""
        self.device = policy.device
        self.weights = FusedWeights(policy.decoder_config, dtype=self.dtype, device=policy.device)
        self._rotary = self._rotary_table(policy)
        self._keys = self._values = self._hidden_columns = torch.empty(0)

    def open(self, num_rows: int, *, clock: int, capacity: int) -> None:
        """Make room; a cache that is large enough is used again."""
        w = self.weights
        shape = (len(w.layers), num_rows, w.num_kv_heads, capacity, w.head_width)
        if self._keys.ndim != 5 or any(
            have < need for have, need in zip(self._keys.shape, shape, strict=True)
        ):
            self._keys = cache_zeros(shape, dtype=self.dtype, device=self.device)
            self._values = cache_zeros(shape, dtype=self.dtype, device=self.device)
        self._hidden_columns = torch.zeros(
            num_rows, self._keys.shape[3], dtype=self.dtype, device=self.device
        )
        self._num_rows, self._clock = num_rows, clock

    def prefill(self, ids: Tensor, mask: Tensor, pictures: Tensor | None) -> Prefix:
        """Run prompts through all layers with full attention."""
        num, length = ids.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=ids.device)
        # A padding column sees itself, so that its softmax is defined; nobody looks at it.
        seen = ((causal & mask[:, None, :]) | itself)[:, None]
        keys, values = [], []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.unflatten(0, (num, length)).transpose(1, 2) for part in (q, k, v))
            keys.append(k)
            values.append(v)
            grouped = self.weights.num_heads != self.weights.num_kv_heads
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
            return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

        hidden = self._run(ids.flatten(), token_positions(mask).flatten(), attend).view(num, length, -1)
        return Prefix(hidden=hidden[:, -1], keys=tuple(keys), values=tuple(values))

    def place(self, rows: Tensor, prefix: Prefix, which: Tensor, lengths: Tensor) -> None:
        """Write the prompts into the columns before the clock."""
        end = self._clock
        start = end - prefix.keys[0].shape[2]
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            self._keys[layer, rows, :, start:end] = keys[which]
            self._values[layer, rows, :, start:end] = values[which]
        columns = torch.arange(self._hidden_columns.shape[1], device=rows.device)
        hidden = columns < (end - lengths)[:, None]
        self._hidden_columns[rows] = torch.where(hidden, -torch.inf, 0.0).to(self.dtype)

    def step(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Append a token to every row; attention looks at the columns that its rows use."""
        oldest = max(lengths)
        if self._clock == self._keys.shape[3]:
            self._shift(oldest - 1)
        at, blocks = self._clock, self._blocks(lengths, oldest)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer, : self._num_rows, :, at] = k
            self._values[layer, : self._num_rows, :, at] = v
            q = q * self._scale
            parts = [
                self._attend(layer, q[rows], rows, slice(at + 1 - window, at + 1), is_even)
                for rows, window, is_even in blocks
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        hidden = self._run(ids, positions, attend)
        self._clock += 1
        return hidden

    def _blocks(self, lengths: Sequence[int], oldest: int) -> list[tuple[slice, int, bool]]:
        """Rows that attend together, the columns they look at, and whether each has written in all of these.

        All rows are one block, or blocks are few rows if those read much less.
        """
        num = self._num_rows
        blocks = []
        for start in range(0, num, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, num))
            longest, shortest = max(lengths[rows]), min(lengths[rows])
            blocks.append((rows, longest, longest == shortest))
        read = sum((rows.stop - rows.start) * window for rows, window, _ in blocks)
        if read < BLOCKS_PAY * num * oldest:
            return blocks
        return [(slice(0, num), oldest, min(lengths) == oldest)]

    def _attend(self, layer: int, q: Tensor, rows: slice, window: slice, is_even: bool) -> Tensor:
        """Mix the values of some columns for scaled queries (N, heads, W) of some rows: (N, heads * W)."""
        w, num = self.weights, len(q)
        grouped = (num * w.num_kv_heads, w.num_heads // w.num_kv_heads)
        keys = self._keys[layer, rows].flatten(0, 1)[:, window]
        values = self._values[layer, rows].flatten(0, 1)[:, window]
        scores = torch.bmm(q.view(*grouped, w.head_width), keys.transpose(1, 2))
        if not is_even:
            scores.view(num, w.num_heads, -1).add_(self._hidden_columns[rows, None, window])
        probs = scores.softmax(-1, dtype=self._softmax_dtype).to(self.dtype)
        return torch.bmm(probs, values).view(num, w.num_heads * w.head_width)

    def move(self, source: Tensor, target: Tensor, num_rows: int) -> None:
        """Copy the used columns of rows."""
        used = slice(0, self._clock)
        if len(source):
            self._keys[:, target, :, used] = self._keys[:, source, :, used]
            self._values[:, target, :, used] = self._values[:, source, :, used]
            self._hidden_columns[target] = self._hidden_columns[source]
        self._num_rows = num_rows

    def logits(self, hidden: Tensor, direction: Direction, ids: slice) -> Tensor:
        """Return logits of some ids of both kinds; the others are not computed."""
        return F.linear(hidden, self.weights.head[ids])

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        w = self.weights
        cos, sin = (table[positions][:, None] for table in self._rotary)
        x = F.embedding(ids, w.embedding)  # (M, D), and added to in place from here on
        for i, layer in enumerate(w.layers):
            q, k, v = self._before(x, layer, cos, sin, w.num_heads, w.num_kv_heads, w.eps)
            self._after(x, attend(i, q, k, v), layer, w.eps)
        return _rms_norm(x, w.norm, w.eps)

    def _shift(self, kept: int) -> None:
        """Move the last `kept` columns to the front."""
        start = self._clock - kept
        for cache in (self._keys[:, : self._num_rows], self._values[:, : self._num_rows]):
            cache[:, :, :, :kept] = cache[:, :, :, start : self._clock].clone()
        self._hidden_columns[:, :kept] = self._hidden_columns[:, start : self._clock].clone()
        self._hidden_columns[:, kept:] = 0.0
        self._clock = kept

    def _rotary_table(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (positions, W), as the model has them; sin is negative in its first half."""
        length = policy.decoder_config.max_position_embeddings
        rotary = cast(torch.nn.Module, policy.lm.base_model.rotary_emb)
        like = torch.empty(1, dtype=self.dtype, device=self.device)
        cos, sin = rotary(like, torch.arange(length, device=self.device)[None])
        half = sin.shape[-1] // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def _before_attention(
    x: Tensor, layer: FusedLayer, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections, rotary embedding: (M, D) to queries, keys and values (M, heads, W)."""
    normed = _rms_norm(x, layer.attention_norm, eps)
    heads = F.linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    turned, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if layer.query_norm is not None and layer.key_norm is not None:
        q = _rms_norm(turned[:, :num_heads], layer.query_norm, eps)
        k = _rms_norm(turned[:, num_heads:], layer.key_norm, eps)
        turned = torch.cat([q, k], dim=1)
    half = turned.shape[-1] // 2
    swapped = torch.cat([turned[..., half:], turned[..., :half]], dim=-1)
    turned = torch.addcmul(turned * cos, swapped, sin)
    return turned[:, :num_heads], turned[:, num_heads:], v


def _after_attention(x: Tensor, attended: Tensor, layer: FusedLayer, eps: float) -> None:
    """Output projection and the gated two-layer network, each added to x (M, D) in place."""
    x.add_(F.linear(attended, layer.out, layer.out_bias))
    normed = _rms_norm(x, layer.mlp_norm, eps)
    gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
    x.add_(F.linear(F.silu(gate).mul_(up), layer.down))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square: on a CPU in half the calls of torch's own function."""
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (x * scale).mul_(weight)
    return normed
