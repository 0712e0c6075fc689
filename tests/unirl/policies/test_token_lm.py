from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from unirl.errors import ConfigError
from unirl.policies.checkpoints import load_policy
from unirl.policies.padding import left_pad
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import ImageGrid, JointVocabulary, word_tokenizer
from unirl.types import Prompt

contract = runpy.run_path(str(Path(__file__).parents[2] / "contracts" / "policy_contract.py"))
PolicyContract, draw, score, random_numbers = (
    contract[name] for name in ("PolicyContract", "draw", "score", "random_numbers")
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DROPOUT = {"attention_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def wrap(toy: SimpleNamespace, lm: type, config: type, extra_ids: int = 0, **sizes: object) -> TokenLM:
    """A random model of a class over the toy vocabulary, with dropout wherever its configuration knows it."""
    vocabulary = sizes.pop("vocabulary", None) or toy.make_vocabulary()
    size = vocabulary.size + extra_ids
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = lm(config(vocab_size=size, pad_token_id=0, **{**SIZES, **DROPOUT, **sizes}))
    return TokenLM(model, vocabulary)


class TestLlama(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return wrap(toy, LlamaForCausalLM, LlamaConfig)


class TestQwen2WithSharedEmbeddings(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return wrap(toy, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True)


class TestQwen3WithMoreIdsThanTheVocabulary(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return wrap(toy, Qwen3ForCausalLM, Qwen3Config, extra_ids=9, head_dim=16)


class TestGemmaWithScaledEmbeddings(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return wrap(toy, GemmaForCausalLM, GemmaConfig, head_dim=16)


class TestGemma2WithSoftCappedLogits(PolicyContract):
    """A cap so low that it bends the logits of a random model, and a window shorter than the prompt."""

    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
        return wrap(toy, Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.2, **sizes)


class TestGpt2WithLearntPositions(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        return wrap(toy, GPT2LMHeadModel, GPT2Config, **sizes)


class TestGridWithRowEnds(PolicyContract):
    """As Emu3 lays pictures out: a size in front, a token behind each row, one behind the last."""

    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return wrap(toy, LlamaForCausalLM, LlamaConfig, vocabulary=row_end_vocabulary(toy))


def row_end_vocabulary(toy: SimpleNamespace) -> JointVocabulary:
    tokenizer = word_tokenizer([*toy.CAPTIONS, "2*2"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<eol>", "<eof>", "<img>"]})
    grid = ImageGrid(
        offset=len(tokenizer),
        num_codes=toy.NUM_CODES,
        rows=2,
        columns=2,
        row_end="<eol>",
        head="2*2<img>",
        tail="<eof>",
    )
    return JointVocabulary(tokenizer, grid)


@pytest.mark.parametrize(
    ("lm", "config", "options"),
    [
        (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "final_logit_softcapping": 0.2}),
        (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    ],
)
def test_logits_are_those_of_the_class(
    toy: SimpleNamespace, lm: type, config: type, options: dict[str, object]
) -> None:
    policy = wrap(toy, lm, config, **options)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        theirs = policy.lm(input_ids=ids).logits
        hidden = policy.backbone(policy.embed(ids), attention_mask=torch.ones_like(ids), positions=ids)
        plain = policy.lm.get_output_embeddings()(hidden)
    torch.testing.assert_close(policy.logits(hidden, "text"), theirs)
    assert not torch.allclose(plain, theirs, atol=1e-3)


def test_a_class_with_an_unknown_head_is_refused(toy: SimpleNamespace) -> None:
    class Doubled(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    with pytest.raises(ConfigError, match=r"^Doubled: logits differ by .* docs/policies.md"):
        wrap(toy, Doubled, LlamaConfig)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_attention_implementation_gives_the_same(
    toy: SimpleNamespace, attention: str, tmp_path: Path
) -> None:
    policy = toy.make_policy()
    policy.save(tmp_path)
    loaded = TokenLM.load(tmp_path, attention=attention)
    assert loaded.lm.config._attn_implementation == attention
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    torch.testing.assert_close(score(loaded, drawn).logprobs, drawn.logprobs, atol=1e-5, rtol=0)


def test_half_precision_loads_with_a_critic_in_float32(toy: SimpleNamespace, tmp_path: Path) -> None:
    toy.make_policy().save(tmp_path)
    policy = TokenLM.load(tmp_path, dtype=torch.bfloat16)
    assert policy.dtype == torch.bfloat16
    prompts = toy.make_prompts("image")
    output = score(policy, draw(policy, prompts, random_numbers(policy, prompts)))
    assert output.logprobs.dtype == output.values.dtype == torch.float32


def test_ppo_05_dropout_of_the_configuration_is_off_everywhere(toy: SimpleNamespace) -> None:
    policy = wrap(toy, GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    assert policy.lm.config.resid_pdrop == 0.1
    rates = [module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout)]
    assert rates and not any(rates)
    llama = wrap(toy, LlamaForCausalLM, LlamaConfig)
    assert llama.lm.config.attention_dropout == 0.1
    assert [layer.self_attn.attention_dropout for layer in llama.lm.model.layers] == [0.0, 0.0]


def test_pictures_and_frames_are_shown_in_order(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    vocabulary = policy.vocabulary
    frames = np.arange(8).reshape(2, 4) % toy.NUM_CODES
    clip = [i for frame in frames.tolist() for i in vocabulary.picture(frame)]
    words = vocabulary.words("black and dark")

    def prompt(direction: str, codes: np.ndarray | None, context: np.ndarray | None) -> Prompt:
        return Prompt(
            key="clip", direction=direction, caption="black and dark", codes=codes, context_codes=context
        )

    last = np.array([3, 2, 1, 0])
    assert policy.prompt_ids(prompt("text", None, frames)) == [2, *clip]
    assert policy.prompt_ids(prompt("text", last, frames)) == [2, *clip, *vocabulary.picture(last)]
    assert policy.prompt_ids(prompt("image", last, frames)) == [2, *clip, *words, 4]
    assert policy.unconditional_ids(prompt("image", last, frames)) == [2, 4]
    assert policy.unconditional_ids(prompt("text", last, frames)) == [2]
    with pytest.raises(ConfigError, match="a picture has 4 codes, found 3"):
        policy.prompt_ids(prompt("image", last, frames[:, :3]))


def test_drawing_from_a_picture_replays(toy: SimpleNamespace) -> None:
    """Picture in, picture out; prompts with one picture and with two in one batch."""
    policy = toy.make_policy()
    made = toy.make_prompts("image", 2)
    prompts = [
        replace(prompt, context_codes=np.stack([made[0].codes] * (n + 1))) for n, prompt in enumerate(made)
    ]
    drawn = draw(policy, prompts, random_numbers(policy, prompts))
    torch.testing.assert_close(score(policy, drawn).logprobs, drawn.logprobs, atol=1e-5, rtol=0)


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
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts), temperature=0.8)
    with torch.no_grad():
        positions = (drawn.attention.long().cumsum(1) - 1).clamp(min=0)
        logits = policy.lm(
            input_ids=drawn.ids, attention_mask=drawn.attention.long(), position_ids=positions
        ).logits[:, drawn.prompt_length - 1 : -1]
    output = score(policy, drawn)
    logits = (logits / 0.8)[..., policy.vocabulary.grid.offset :]
    log_probs = logits.log_softmax(-1)
    codes = drawn.responses - policy.vocabulary.grid.offset
    chosen = log_probs.gather(-1, codes[..., None])[..., 0]
    torch.testing.assert_close(output.logprobs, chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, -(log_probs.exp() * log_probs).sum(-1), atol=1e-5, rtol=0)


def test_left_pad() -> None:
    ids, mask = left_pad([[5], [6, 7, 8], [9, 9]], pad=0)
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8], [0, 9, 9]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "critic.safetensors"])
def test_a_file_that_is_cut_short_is_said(toy: SimpleNamespace, tmp_path: Path, name: str) -> None:
    """As a power cut leaves it."""
    toy.make_policy().save(tmp_path / "sft")
    file = tmp_path / "sft" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"sft: a file of the model is cut short or damaged.*put it back"):
        load_policy(tmp_path / "sft")
