from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from unirl.cli.app import main
from unirl.errors import ConfigError
from unirl.policies.join_vocabulary import join_vocabulary
from unirl.policies.token_lm import TokenLM

contract = runpy.run_path(str(Path(__file__).parents[2] / "contracts" / "policy_contract.py"))
PolicyContract = contract["PolicyContract"]


def byte_tokenizer(toy: SimpleNamespace, eos: str | None = "<|end|>") -> PreTrainedTokenizerFast:
    """Byte-level BPE as language models have it, without pad, bos or any mark of pictures."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(toy.CAPTIONS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)


def language_model(size: int, *, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(config)


def joined(toy: SimpleNamespace, *, tied: bool = False, spare: int = 0, **options: object) -> TokenLM:
    tokenizer = byte_tokenizer(toy)
    lm = language_model(len(tokenizer) + spare, tied=tied)
    return join_vocabulary(lm, tokenizer, toy.make_tokenizer(), **options)


class TestJoined(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return joined(toy)


class TestJoinedWithSharedEmbeddingsAndRowEnds(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> TokenLM:
        return joined(toy, tied=True, row_ends=True, first_vectors="codebook")


@pytest.mark.parametrize("tied", [False, True])
def test_what_it_says_of_text_stays(toy: SimpleNamespace, tied: bool) -> None:
    tokenizer = byte_tokenizer(toy)
    old = len(tokenizer)
    ids = torch.tensor([tokenizer.encode("black and white")])
    with torch.no_grad():
        before = language_model(old, tied=tied)(input_ids=ids).logits
        policy = joined(toy, tied=tied)
        after = policy.lm(input_ids=ids).logits
    torch.testing.assert_close(after[..., :old], before)
    assert policy.vocabulary.words("black and white") == ids[0].tolist()


def test_new_ids_stand_behind_the_old_ones(toy: SimpleNamespace) -> None:
    policy = joined(toy, row_ends=True)
    vocabulary, old = policy.vocabulary, len(byte_tokenizer(toy))
    marks = [vocabulary.pad, vocabulary.bos, vocabulary.begin_image, vocabulary.end_image, vocabulary.row_end]
    assert sorted(marks) == list(range(old, old + 5)) and vocabulary.grid.offset == old + 5
    assert policy.lm.config.vocab_size == vocabulary.size == old + 5 + toy.NUM_CODES
    assert policy.lm.config.pad_token_id == vocabulary.pad
    assert vocabulary.tokenizer.eos_token == "<|end|>" and vocabulary.eos < old


def test_unused_rows_of_the_embedding_are_used(toy: SimpleNamespace) -> None:
    policy = joined(toy, spare=100)
    assert policy.lm.config.vocab_size == len(byte_tokenizer(toy)) + 100
    assert policy.vocabulary.size < policy.lm.config.vocab_size
    assert not policy.allowed("image")[policy.vocabulary.size :].any()


@pytest.mark.parametrize("tied", [False, True])
def test_first_vectors_near_the_mean_by_the_seed(toy: SimpleNamespace, tied: bool) -> None:
    before = torch.get_rng_state()
    one, same, other = (joined(toy, tied=tied, noise=0.1, seed=seed) for seed in (1, 1, 2))
    assert torch.get_rng_state().equal(before)
    old = len(byte_tokenizer(toy))
    for name in ("get_input_embeddings", "get_output_embeddings"):
        first, again, another = (getattr(p.lm, name)().weight.detach() for p in (one, same, other))
        assert first.equal(again) and not first[old:].equal(another[old:])
        distance = (first[old:] - first[:old].mean(0)) / first[:old].std(0)
        assert 0.08 < float(distance.std()) < 0.12 and first[:old].equal(another[:old])
    assert (one.lm.lm_head.weight is one.lm.model.embed_tokens.weight) == tied


def test_codes_that_are_close_in_the_codebook_start_close(toy: SimpleNamespace) -> None:
    policy = joined(toy, first_vectors="codebook", noise=0.0)
    weight = policy.lm.model.embed_tokens.weight.detach()
    grid, old = policy.vocabulary.grid, len(byte_tokenizer(toy))
    rows = (weight[grid.offset :] - weight[:old].mean(0)) / weight[:old].std(0)
    codes = toy.make_tokenizer().model.quantize.embedding.weight.detach()
    codes = (codes - codes.mean(0)) / codes.std(0)
    pairs = torch.stack([torch.pdist(rows), torch.pdist(codes)])
    assert float(torch.corrcoef(pairs)[0, 1]) > 0.8
    assert 0.5 < float(rows.std()) < 1.5


def test_the_command_writes_a_policy(
    toy: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer(toy)
    language_model(len(tokenizer)).to(torch.bfloat16).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    toy.make_tokenizer().save(tmp_path / "vq")
    arguments = ["join", str(tmp_path / "lm"), str(tmp_path / "vq"), "--out", str(tmp_path / "policy")]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--row-ends", "--seed", "3"])
    assert not ended.value.code
    assert "8 image codes from id" in capsys.readouterr().out
    policy = TokenLM.load(tmp_path / "policy")
    assert policy.vocabulary.grid.row_end == "<eol>" and policy.vocabulary.grid.response_length == 6
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<|end|>"
    assert TokenLM.load(tmp_path / "policy", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(SystemExit):
        main([*arguments[:3], "--out", str(tmp_path / "other"), "--first-vectors", "random"])
    assert "'mean' or 'codebook', found 'random'" in capsys.readouterr().err


def test_what_does_not_belong_together_is_refused(toy: SimpleNamespace) -> None:
    images, tokenizer = toy.make_tokenizer(), byte_tokenizer(toy)
    size = len(tokenizer)
    with pytest.raises(ConfigError, match=rf"the tokenizer has {size} ids, the model embeds {size - 1}"):
        join_vocabulary(language_model(size - 1), tokenizer, images)
    with pytest.raises(ConfigError, match="no end-of-text token"):
        join_vocabulary(language_model(size), byte_tokenizer(toy, eos=None), images)
