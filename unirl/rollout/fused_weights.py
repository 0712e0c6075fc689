"""Weights of Llama-like decoders, laid out for decoding: one matrix where the model has two or three."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from unirl.rollout.weight_copies import WeightCopies

__all__ = ["FusedLayer", "FusedWeights", "is_fusible"]

FUSIBLE = ("llama", "qwen2", "qwen3")
"""`model_type` of the configurations whose layers are the ones below."""
HEAD_RULES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits behind the head."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone."""


def is_fusible(config: PretrainedConfig) -> bool:
    """Say whether the decoder of this configuration is one that `FusedWeights` can hold."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FUSIBLE
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in STATIC_ROPE
        and layers == {"full_attention"}
        and not getattr(config, "mlp_bias", False)
        and not any(getattr(config, rule, None) for rule in HEAD_RULES)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One layer. Matrices are (out, in), as `torch.nn.functional.linear` takes them."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedWeights:
    """Buffers that a checkpoint's tensors are copied into, kept from sync to sync."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_width = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.width, self.eps = config.hidden_size, config.rms_norm_eps
        self.tied = bool(config.tie_word_embeddings)

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        query, kv = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        has_qkv_bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
        has_out_bias = config.model_type != "qwen2" and has_qkv_bias
        has_head_norms = config.model_type == "qwen3"
        self.layers = [
            FusedLayer(
                attention_norm=empty(self.width),
                qkv=empty(query + 2 * kv, self.width),
                qkv_bias=empty(query + 2 * kv) if has_qkv_bias else None,
                query_norm=empty(self.head_width) if has_head_norms else None,
                key_norm=empty(self.head_width) if has_head_norms else None,
                out=empty(self.width, query),
                out_bias=empty(self.width) if has_out_bias else None,
                mlp_norm=empty(self.width),
                gate_up=empty(2 * config.intermediate_size, self.width),
                down=empty(self.width, config.intermediate_size),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.embedding = empty(config.vocab_size, self.width)
        self.head = self.embedding if self.tied else empty(config.vocab_size, self.width)
        self.norm = empty(self.width)
        self.copies = WeightCopies(dict(self._named_places(query, kv, config.intermediate_size)))
        """Where the tensors of a checkpoint go, each byte once."""

    def _named_places(self, query: int, kv: int, mlp: int) -> Iterable[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embedding
        yield "model.norm.weight", self.norm
        yield "lm_head.weight", self.head
        for i, layer in enumerate(self.layers):
            base = f"model.layers.{i}"
            yield f"{base}.input_layernorm.weight", layer.attention_norm
            yield f"{base}.post_attention_layernorm.weight", layer.mlp_norm
            for name, part in zip(
                ("q_proj", "k_proj", "v_proj"), layer.qkv.split([query, kv, kv]), strict=True
            ):
                yield f"{base}.self_attn.{name}.weight", part
            if layer.qkv_bias is not None:
                parts = layer.qkv_bias.split([query, kv, kv])
                for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                    yield f"{base}.self_attn.{name}.bias", part
            if layer.query_norm is not None and layer.key_norm is not None:
                yield f"{base}.self_attn.q_norm.weight", layer.query_norm
                yield f"{base}.self_attn.k_norm.weight", layer.key_norm
            yield f"{base}.self_attn.o_proj.weight", layer.out
            if layer.out_bias is not None:
                yield f"{base}.self_attn.o_proj.bias", layer.out_bias
            for name, part in zip(("gate_proj", "up_proj"), layer.gate_up.split([mlp, mlp]), strict=True):
                yield f"{base}.mlp.{name}.weight", part
            yield f"{base}.mlp.down_proj.weight", layer.down
