"""The two decoders on the architectures that they serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from unirl.errors import ConfigError, RolloutError
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.fused_decoder import FusedDecoder
from unirl.rollout.fused_weights import FusedWeights
from unirl.rollout.generic_decoder import GenericDecoder
from unirl.rollout.native import NativeEngine
from unirl.trainer.replay import replay_tokens
from unirl.types import Rollout, SamplingSettings

GUIDED = SamplingSettings(temperature=0.9, guidance=2.0)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
FUSED = {
    "llama": lambda v: LlamaForCausalLM(LlamaConfig(vocab_size=v, tie_word_embeddings=True, **SIZES)),
    "llama, scaled rotary": lambda v: LlamaForCausalLM(
        LlamaConfig(vocab_size=v, rope_parameters=SCALED, attention_bias=True, **SIZES)
    ),
    "qwen2": lambda v: Qwen2ForCausalLM(Qwen2Config(vocab_size=v, **SIZES)),
    "qwen3": lambda v: Qwen3ForCausalLM(Qwen3Config(vocab_size=v, head_dim=16, **SIZES)),
}
GENERIC = {
    "gemma": lambda v: GemmaForCausalLM(GemmaConfig(vocab_size=v, head_dim=16, **SIZES)),
    "qwen2, sliding window": lambda v: Qwen2ForCausalLM(
        Qwen2Config(vocab_size=v, use_sliding_window=True, sliding_window=3, max_window_layers=1, **SIZES)
    ),
    "llama, bias in the mlp": lambda v: LlamaForCausalLM(LlamaConfig(vocab_size=v, mlp_bias=True, **SIZES)),
}


def make(toy: SimpleNamespace, name: str) -> TokenLM:
    """A policy of this architecture; norms and biases are moved off their first values."""
    vocabulary = toy.make_vocabulary()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm: PreTrainedModel = {**FUSED, **GENERIC}[name](vocabulary.size)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return TokenLM(lm, vocabulary)


def request_for(toy: SimpleNamespace) -> RolloutRequest:
    prompts = toy.make_prompts("text", 4)
    seeds = [(1, p) for p in range(4)]
    return RolloutRequest(prompts=prompts, group_size=3, max_new_tokens=6, seeds=seeds, sampling=GUIDED)


def assert_replays(policy: TokenLM, rollout: Rollout) -> None:
    with torch.no_grad():
        scored = replay_tokens(policy, policy, rollout, GUIDED).logprobs
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.old_logprobs[mask], scored[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_decoder_is_the_model(toy: SimpleNamespace, name: str) -> None:
    policy, request = make(toy, name), request_for(toy)
    engine = NativeEngine(policy, max_rows=5)
    assert isinstance(engine.decoder, FusedDecoder)
    fused, generic = (
        engine.rollout(request),
        NativeEngine(policy, decoder=GenericDecoder(policy)).rollout(request),
    )
    assert fused.input_ids.equal(generic.input_ids)
    torch.testing.assert_close(fused.old_logprobs, generic.old_logprobs, atol=1e-5, rtol=0)
    assert_replays(policy, fused)


@pytest.mark.parametrize("name", GENERIC)
def test_other_models_decode_through_their_own_forward_pass(toy: SimpleNamespace, name: str) -> None:
    policy = make(toy, name)
    engine = NativeEngine(policy, max_rows=5)
    assert isinstance(engine.decoder, GenericDecoder)
    assert_replays(policy, engine.rollout(request_for(toy)))
    with pytest.raises(ConfigError, match="decodes through its own forward pass"):
        NativeEngine(policy, dtype=torch.bfloat16)


def test_weights_have_their_places_and_places_their_weights(toy: SimpleNamespace) -> None:
    policy = make(toy, "qwen2")
    weights = FusedWeights(policy.decoder_config, dtype=torch.float32, device=policy.device)
    given = dict(policy.weights())
    weights.copies.load(given.items())
    with pytest.raises(RolloutError, match=r"model\.extra\.weight: the decoder has no such weight"):
        weights.copies.load([*given.items(), ("model.extra.weight", torch.zeros(1))])
    with pytest.raises(RolloutError, match=r"model\.norm\.weight: shape \(7,\), the decoder has \(32,\)"):
        weights.copies.load([("model.norm.weight", torch.zeros(7))])
    given.pop("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(
        RolloutError, match=r"1 weights were not given, the first is model\.layers\.1\.mlp\.down"
    ):
        weights.copies.load(given.items())


@pytest.mark.slow
def test_a_compiled_decoder_gives_the_same(toy: SimpleNamespace) -> None:
    policy, request = make(toy, "llama"), request_for(toy)
    plain, compiled = (
        NativeEngine(policy).rollout(request),
        NativeEngine(policy, compile=True).rollout(request),
    )
    assert plain.input_ids.equal(compiled.input_ids)
    torch.testing.assert_close(plain.old_logprobs, compiled.old_logprobs, atol=1e-5, rtol=0)
