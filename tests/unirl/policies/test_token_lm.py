from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from unirl.errors import ConfigError
from unirl.policies.token_lm import TokenLM, left_pad

contract = runpy.run_path(str(Path(__file__).parent / "policy_contract.py"))
PolicyContract, roll_out, score = contract["PolicyContract"], contract["roll_out"], contract["score"]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


class TestToyLlama(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return toy.make_policy()


class TestQwen2WithSharedEmbeddings(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return _wrap(toy, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, **SIZES)


class TestGemmaWithDropoutInItsConfig(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return _wrap(toy, GemmaForCausalLM, GemmaConfig, head_dim=16, attention_dropout=0.5, **SIZES)


class TestGpt2WithLearntPositions(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.3}
        return _wrap(toy, GPT2LMHeadModel, GPT2Config, **sizes)


class TestQwen3WithMoreIdsThanTheVocabulary(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return _wrap(toy, Qwen3ForCausalLM, Qwen3Config, extra_ids=9, head_dim=16, **SIZES)


def _wrap(toy: SimpleNamespace, model: type, config: type, extra_ids: int = 0, **sizes: object) -> TokenLM:
    vocabulary = toy.make_vocabulary()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lm: PreTrainedModel = model(config(vocab_size=vocabulary.size + extra_ids, pad_token_id=0, **sizes))
    return TokenLM(lm, vocabulary)


def test_the_weights_depend_on_the_seed_alone(toy: SimpleNamespace) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = toy.make_policy(seed=1)
    assert torch.get_rng_state().equal(before)
    torch.rand(3)
    second, other = toy.make_policy(seed=1), toy.make_policy(seed=2)
    weights = [p.lm.model.embed_tokens.weight for p in (first, second, other)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])


def test_prompts_and_responses_in_tokens(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    vocabulary = policy.vocabulary
    draw, write = toy.make_prompts("image")[1], toy.make_prompts("text")[1]
    words = vocabulary.words("black and dark")
    codes = [int(code) + vocabulary.grid.offset for code in draw.codes]
    assert policy.prompt_ids(draw) == [2, *words, 4]
    assert policy.response_ids(draw) == codes
    assert policy.prompt_ids(write) == [2, 4, *codes, 5]
    assert policy.response_ids(write) == [*words, 3]
    assert policy.max_response_length("text", 3) == 4
    assert policy.max_response_length("image", 3) == 4


@pytest.mark.parametrize("method", ["prompt_ids", "response_ids"])
def test_a_picture_without_codes_is_refused_by_key(toy: SimpleNamespace, method: str) -> None:
    prompt = toy.Prompt(key="p7", direction="text" if method == "prompt_ids" else "image", caption="black")
    with pytest.raises(ConfigError, match=r"^p7: "):
        getattr(toy.make_policy(), method)(prompt)


def test_a_caption_that_cannot_be_written_is_refused_by_key(toy: SimpleNamespace) -> None:
    """Its log-probability would be -inf and the loss with it."""
    prompt = toy.Prompt(key="p7", direction="text", caption="black and purple")
    with pytest.raises(
        ConfigError, match=r"p7: caption 'black and purple' has a word that the vocabulary lacks"
    ):
        toy.make_policy().response_ids(prompt)


def test_a_model_too_small_for_the_vocabulary_is_refused(toy: SimpleNamespace) -> None:
    vocabulary = toy.make_vocabulary()
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary.size - 1, **SIZES))
    with pytest.raises(
        ConfigError, match=f"embeds {vocabulary.size - 1} ids, the vocabulary has {vocabulary.size}"
    ):
        TokenLM(lm, vocabulary)


def test_a_policy_without_a_saved_critic_starts_one(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy = toy.make_policy()
    with torch.no_grad():
        policy.critic.value.bias.fill_(1.0)
    policy.save(tmp_path)
    (tmp_path / "critic.safetensors").unlink()
    assert not TokenLM.load(tmp_path).critic.value.bias.any()


def test_logprobs_are_those_of_the_whole_distribution(toy: SimpleNamespace) -> None:
    """Against the model's own logits, position by position."""
    policy = toy.make_policy()
    rollout = roll_out(policy, toy, "image", temperature=0.8)
    with torch.no_grad():
        positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
        logits = policy.lm(
            input_ids=rollout.input_ids, attention_mask=rollout.attention_mask.long(), position_ids=positions
        ).logits[:, rollout.prompt_length - 1 : -1]
        output = score(policy, rollout)
    logits = (logits / 0.8)[..., policy.vocabulary.grid.offset :]
    log_probs = logits.log_softmax(-1)
    codes = rollout.response_ids - policy.vocabulary.grid.offset
    chosen = log_probs.gather(-1, codes[..., None])[..., 0]
    torch.testing.assert_close(output.logprobs, chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, -(log_probs.exp() * log_probs).sum(-1), atol=1e-5, rtol=0)


def test_left_pad() -> None:
    ids, mask = left_pad([[5], [6, 7, 8], [9, 9]], pad=0)
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8], [0, 9, 9]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert ids.dtype == torch.int64
