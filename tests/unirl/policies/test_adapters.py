from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from unirl.errors import ConfigError
from unirl.policies.adapters import (
    adapters_off,
    add_adapters,
    has_adapters,
    load_adapters,
    merged_weights,
    save_adapters,
)
from unirl.policies.policy import Policy
from unirl.policies.reference import BaseReference, reference_of
from unirl.policies.token_lm import TokenLM

pytest.importorskip("peft", reason="the extra lora is not installed")

contract = runpy.run_path(str(Path(__file__).parents[2] / "contracts" / "policy_contract.py"))
PolicyContract, draw, score, random_numbers = (
    contract[name] for name in ("PolicyContract", "draw", "score", "random_numbers")
)
janus = runpy.run_path(str(Path(__file__).parent / "test_janus.py"))
causal = runpy.run_path(str(Path(__file__).parent / "test_token_lm.py"))


def adapted(policy: Policy) -> Policy:
    """With adapters as after some training: none of them is zero."""
    add_adapters(policy.lm, rank=2, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.normal_(std=0.1, generator=generator)
    return policy


class TestLlamaWithAdapters(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> Policy:
        return adapted(causal["wrap"](toy, LlamaForCausalLM, LlamaConfig))


class TestTiedQwen2WithAdapters(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> Policy:
        return adapted(causal["wrap"](toy, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True))


class TestGpt2WithAdaptersInTransposedLayers(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> Policy:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        return adapted(causal["wrap"](toy, GPT2LMHeadModel, GPT2Config, **sizes))


class TestJanusWithAdapters(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> Policy:
        return adapted(janus["make_janus"](toy))


def test_fresh_adapters_change_nothing_and_alone_are_trained(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    plain = {name: value.clone() for name, value in policy.weights()}
    add_adapters(policy.lm, rank=2, seed=3)
    torch.testing.assert_close(score(policy, drawn).logprobs, drawn.logprobs, atol=1e-5, rtol=0)
    assert all(value.equal(plain[name]) for name, value in policy.weights())
    names = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or name.startswith("critic.") for name in names)
    layers = len(policy.lm.model.layers)
    assert len(policy.trained_parameters()) == 2 * 7 * layers
    assert type(policy.lm) is LlamaForCausalLM and "lm_head" not in " ".join(names)


def test_only_the_language_model_of_janus_gets_adapters(toy: SimpleNamespace) -> None:
    policy = adapted(janus["make_janus"](toy))
    names = [name for name, parameter in policy.lm.named_parameters() if parameter.requires_grad]
    assert names and all(name.startswith("model.language_model.layers.") for name in names)


def test_the_seed_decides_the_adapters_and_the_global_stream_is_left_alone(toy: SimpleNamespace) -> None:
    before = torch.get_rng_state()
    first, second, other = (toy.make_policy() for _ in range(3))
    add_adapters(first.lm, rank=2, seed=3)
    assert torch.get_rng_state().equal(before)
    add_adapters(second.lm, rank=2, seed=3)
    add_adapters(other.lm, rank=2, seed=4)
    pairs = list(zip(*(p.trained_parameters() for p in (first, second, other)), strict=True))
    assert all(a.equal(b) for a, b, _ in pairs) and not all(a.equal(c) for a, _, c in pairs)


def test_a_step_moves_adapters_only_and_the_reference_stays(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    prompts = toy.make_prompts("image")
    add_adapters(policy.lm, rank=2)
    reference = reference_of(policy)
    assert isinstance(reference, BaseReference) and not list(reference.parameters())
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    before = score(reference, drawn)
    base = {n: p.clone() for n, p in policy.lm.named_parameters() if ".lora_" not in n}
    optimizer = torch.optim.SGD(policy.trained_parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        output = policy(drawn.ids, drawn.attention, prompt_length=drawn.prompt_length, direction="image")
        (-output.logprobs.mean()).backward()
        optimizer.step()
    after = score(reference, drawn)
    assert after.logprobs.equal(before.logprobs)
    assert (score(policy, drawn).logprobs - before.logprobs).abs().max() > 1e-3
    assert all(p.equal(base[n]) for n, p in policy.lm.named_parameters() if ".lora_" not in n)
    assert all(p.requires_grad for p in policy.trained_parameters())
    assert len(policy.trained_parameters()) > 0


def test_the_reference_draws_as_the_base_did(toy: SimpleNamespace) -> None:
    """It is a whole policy: it makes prompts, samples with a cache, and is never saved."""
    policy = toy.make_policy()
    prompts = toy.make_prompts("text")
    numbers = random_numbers(policy, prompts)
    base = draw(policy, prompts, numbers)
    adapted(policy)
    reference = reference_of(policy)
    assert draw(reference, prompts, numbers).ids.equal(base.ids)
    assert reference.unconditional_ids(prompts[0]) == policy.unconditional_ids(prompts[0])
    assert reference.pictures(prompts) is None
    with adapters_off(policy.lm):
        torch.testing.assert_close(score(policy, base).logprobs, score(reference, base).logprobs)
    with pytest.raises(ConfigError, match="save the policy"):
        reference.save(Path("nowhere"))


def test_without_adapters_the_reference_is_a_frozen_copy(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    reference = reference_of(policy)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    with torch.no_grad():
        next(policy.lm.parameters()).zero_()
    assert next(reference.lm.parameters()).any()


def test_adapters_alone_go_to_disk_and_back(toy: SimpleNamespace, tmp_path: Path) -> None:
    """Exactly, and in peft's own format."""
    from peft import PeftModel

    policy = adapted(toy.make_policy())
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    save_adapters(policy.lm, tmp_path)
    again = toy.make_policy()
    load_adapters(again.lm, tmp_path)
    assert score(again, drawn).logprobs.equal(score(policy, drawn).logprobs)
    theirs = PeftModel.from_pretrained(toy.make_policy().lm, tmp_path)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, policy.lm(input_ids=ids).logits)


def test_merged_weights_make_a_plain_model_that_says_the_same(toy: SimpleNamespace) -> None:
    policy, plain = adapted(toy.make_policy()), toy.make_policy()
    missing, left_over = plain.lm.load_state_dict(dict(merged_weights(policy.lm)), strict=False)
    assert not missing and not left_over and not has_adapters(plain.lm)
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    torch.testing.assert_close(score(plain, drawn).logprobs, drawn.logprobs, atol=1e-5, rtol=0)


def test_what_cannot_work_is_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy: TokenLM = toy.make_policy()
    with pytest.raises(ConfigError, match="lora rank must be 1 or more, found 0"):
        add_adapters(policy.lm, rank=0)
    with pytest.raises(ConfigError, match="no adapters to save"):
        save_adapters(policy.lm, tmp_path)
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors"):
        load_adapters(policy.lm, tmp_path)
    add_adapters(policy.lm, rank=2)
    with pytest.raises(ConfigError, match="has LoRA adapters already"):
        add_adapters(policy.lm, rank=2)
    save_adapters(policy.lm, tmp_path)
    with pytest.raises(ConfigError, match=r"belong to another model, .*lora_[AB].*does not fit"):
        load_adapters(toy.make_policy(width=64).lm, tmp_path)
