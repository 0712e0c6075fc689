"""What proves that a native engine decodes with the policy's weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from unirl.errors import RolloutError
from unirl.policies.adapters import add_adapters
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.rollout import compared_copies
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.fused_decoder import FusedDecoder
from unirl.rollout.generic_decoder import CopyDecoder, GenericDecoder
from unirl.rollout.native import NativeEngine
from unirl.rollout.weight_copies import WeightCopies
from unirl.rollout.weight_sync_probe import PROBE_GAPS

DECODERS = {"fused": lambda policy: FusedDecoder(policy, dtype=policy.dtype), "copy": CopyDecoder}


@pytest.fixture
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=5)


def tied_policy(toy: SimpleNamespace) -> TokenLM:
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TokenLM(LlamaForCausalLM(config), toy.make_vocabulary())


def request_for(toy: SimpleNamespace) -> RolloutRequest:
    prompts = toy.make_prompts("text", 2)
    return RolloutRequest(prompts=prompts, group_size=2, max_new_tokens=4, seeds=[(0, 0), (0, 1)])


def move(policy: Policy) -> None:
    """A step of training: less than what the probe could see."""
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.add_(1e-7)


@pytest.mark.parametrize("decoder", DECODERS)
def test_each_sync_says_what_it_copied_and_how_far_the_probe_was(
    policy: TokenLM, toy: SimpleNamespace, decoder: str
) -> None:
    engine = NativeEngine(policy, decoder=DECODERS[decoder](policy))
    for version in (3, 4):
        move(policy)
        engine.sync(policy, version)
        before = engine.last_sync
        assert before is not None and (before.version, before.probe_s) == (version, 0.0)
        assert before.num_tensors == len(policy.lm.state_dict())
        assert before.num_bytes == sum(tensor.nbytes for tensor in policy.lm.state_dict().values())
        engine.rollout(request_for(toy))
        after = engine.last_sync
        assert after is not None and after.probe_s > 0 and after.probe_gap < PROBE_GAPS["float32"]
        engine.rollout(request_for(toy))
        assert engine.last_sync is after


def test_a_decoder_without_tensors_of_its_own_has_nothing_to_prove(
    policy: TokenLM, toy: SimpleNamespace
) -> None:
    engine = NativeEngine(policy, decoder=GenericDecoder(policy))
    engine.rollout(request_for(toy))
    assert engine.last_sync is not None and engine.last_sync.num_bytes == 0
    assert engine.last_sync.probe_s == 0.0


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_copy_that_is_lost_on_its_way_is_named(
    policy: TokenLM, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor keeps its old values: too little of a change for any probe."""
    engine = NativeEngine(policy, decoder=DECODERS[decoder](policy))
    engine.sync(policy, 0)
    move(policy)
    lost, copy = policy.lm.model.layers[1].mlp.up_proj.weight, np.copyto

    def copy_but_one(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        if source.ctypes.data != lost.data_ptr():
            copy(target, source)

    monkeypatch.setattr(compared_copies.np, "copyto", copy_but_one)
    with pytest.raises(RolloutError, match=r"other bytes for model\.layers\.1\.mlp\.up_proj\.weight"):
        engine.sync(policy, 1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stale_copy_is_found_by_the_probe_and_named(
    policy: TokenLM, toy: SimpleNamespace, decoder: str
) -> None:
    engine = NativeEngine(policy, decoder=DECODERS[decoder](policy))
    engine.sync(policy, 1)
    place = engine.decoder.copies.places["model.layers.0.self_attn.v_proj.weight"]
    with torch.no_grad():
        place.mul_(-3.0)
    with pytest.raises(RolloutError, match=r"other bytes for model\.layers\.0\.self_attn\.v_proj\.weight"):
        engine.rollout(request_for(toy))


def test_right_tensors_in_a_wrong_function_are_found(policy: TokenLM, toy: SimpleNamespace) -> None:
    """Gate and up change places: all bytes arrive, and another network is computed."""
    decoder = FusedDecoder(policy, dtype=policy.dtype)
    places = decoder.copies.places
    for layer in range(len(decoder.weights.layers)):
        gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        places[gate], places[up] = places[up], places[gate]
    engine = NativeEngine(policy, decoder=decoder)
    engine.sync(policy, 6)
    with pytest.raises(RolloutError, match=r"version 6: on the fixed probe \(text\).*allowed are 0\.0001"):
        engine.rollout(request_for(toy))
    assert engine.last_sync is not None and engine.last_sync.probe_gap == 0.0


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_tied_head_is_compared_and_need_not_come(toy: SimpleNamespace, decoder: str) -> None:
    policy = tied_policy(toy)
    copies = DECODERS[decoder](policy).copies
    weights = dict(policy.weights())
    copies.load(weights.items())
    assert copies.num_tensors == len(weights)
    copies.load((name, tensor) for name, tensor in weights.items() if name != "lm_head.weight")
    with pytest.raises(RolloutError, match=r"for lm_head\.weight.* A tied pair whose tensors differ"):
        copies.load((weights | {"lm_head.weight": weights["lm_head.weight"] + 1}).items())


def test_merged_adapters_are_proven(policy: TokenLM, toy: SimpleNamespace) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    add_adapters(policy.lm, rank=2)
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    engine = NativeEngine(policy)
    engine.rollout(request_for(toy))
    assert engine.last_sync is not None and 0 < engine.last_sync.probe_gap < PROBE_GAPS["float32"]

    class Unmerged(TokenLM):
        def weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.lm.state_dict().items():
                if "lora_" not in name:
                    yield name.replace(".base_layer", ""), tensor

    with pytest.raises(RolloutError, match=r"fixed probe \(text\)"):
        NativeEngine(Unmerged(policy.lm, policy.vocabulary)).rollout(request_for(toy))


def test_another_precision_is_allowed_what_it_explains(policy: TokenLM, toy: SimpleNamespace) -> None:
    engine = NativeEngine(policy, dtype=torch.bfloat16)
    engine.rollout(request_for(toy))
    assert engine.last_sync is not None
    assert PROBE_GAPS["float32"] < engine.last_sync.probe_gap < PROBE_GAPS["bfloat16"]
    assert engine.last_sync.num_bytes == sum(tensor.nbytes // 2 for tensor in policy.lm.state_dict().values())


def test_a_decoder_follows_its_policy_to_another_device(policy: TokenLM, toy: SimpleNamespace) -> None:
    """An engine is made before the trainer moves the policy to where it trains."""
    wanted = NativeEngine(policy).rollout(request_for(toy))
    with torch.device("meta"):
        elsewhere = TokenLM(LlamaForCausalLM(policy.lm.config), policy.vocabulary)
    engine = NativeEngine(policy, decoder=FusedDecoder(elsewhere, dtype=policy.dtype))
    assert engine.rollout(request_for(toy)).input_ids.equal(wanted.input_ids)


def testplaces_of_several_dtypes_keep_theirs() -> None:
    copies = WeightCopies({"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.int64)})
    given = {"a": torch.tensor([1.0, 2.0, -3.0, 0.5, float("nan")]), "b": torch.tensor([1, -(2**40), 7])}
    copies.load(given.items())
    assert copies.places["b"].equal(given["b"])
    assert copies.places["a"].float().nan_to_num().equal(given["a"].nan_to_num())
    copies.require_same(given.items())
    with pytest.raises(RolloutError, match="for b than the policy"):
        copies.require_same({"b": given["b"] + 1}.items())
