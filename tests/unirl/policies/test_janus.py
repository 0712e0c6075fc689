from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import JanusConfig, JanusForConditionalGeneration, JanusVisionConfig, LlamaConfig
from transformers.models.janus.configuration_janus import JanusVQVAEConfig

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.policies.checkpoints import load_policy
from unirl.policies.janus import JanusPolicy
from unirl.policies.vocabulary import ImageGrid, JointVocabulary, word_tokenizer
from unirl.rollout.native import NativeEngine
from unirl.trainer.sft import train_supervised
from unirl.types import Prompt

contract = runpy.run_path(str(Path(__file__).parents[2] / "contracts" / "policy_contract.py"))
PolicyContract, draw, score, random_numbers = (
    contract[name] for name in ("PolicyContract", "draw", "score", "random_numbers")
)

EXTRA_IDS = 3


def make_vocabulary(toy: SimpleNamespace, **grid: int) -> JointVocabulary:
    tokenizer = word_tokenizer(toy.CAPTIONS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<shown>"]})
    sizes = {"offset": len(tokenizer) + EXTRA_IDS, "num_codes": toy.NUM_CODES, "rows": 2, "columns": 2}
    return JointVocabulary(tokenizer, ImageGrid(**{**sizes, **grid}))


def make_janus(toy: SimpleNamespace, **grid: int) -> JanusPolicy:
    """A tiny random Janus with dropout in its configuration; pictures of 8 pixels, 4 vectors each."""
    vocabulary = make_vocabulary(toy, **grid)
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=len(vocabulary.tokenizer) + EXTRA_IDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            attention_dropout=0.1,
            pad_token_id=vocabulary.pad,
        ),
        vision_config=JanusVisionConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=toy.SIDE,
            patch_size=4,
            projection_dim=32,
            num_image_tokens=4,
            attention_dropout=0.1,
            hidden_dropout_rate=0.1,
        ),
        vq_config=JanusVQVAEConfig(
            embed_dim=4,
            num_embeddings=toy.NUM_CODES,
            base_channels=32,
            channel_multiplier=[1, 1, 1],
            num_res_blocks=1,
            latent_channels=32,
            projection_dim=32,
            image_token_embed_dim=32,
        ),
        image_token_id=vocabulary.tokenizer.convert_tokens_to_ids("<shown>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return JanusPolicy(JanusForConditionalGeneration(config), vocabulary)


class TestJanus(PolicyContract):
    @pytest.fixture
    def policy(self, toy: SimpleNamespace) -> JanusPolicy:
        return make_janus(toy)


def test_both_heads_are_those_of_the_class(toy: SimpleNamespace) -> None:
    """Against transformers' own forward pass: text after a shown picture, codes after words."""
    policy = make_janus(toy)
    vocabulary, model = policy.vocabulary, policy.lm.model
    write, sketch = toy.make_prompts("text")[1], toy.make_prompts("image")[1]
    ids = torch.tensor([policy.prompt_ids(write)])
    pictures = policy.pictures([write])
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1])[None]
    codes = torch.tensor([vocabulary.drawing(sketch.codes.tolist())])
    with torch.no_grad():
        theirs = policy.lm(input_ids=ids, pixel_values=pictures).logits
        hidden = policy.backbone(policy.embed(ids, pictures), attention_mask=mask, positions=positions)
        ours = policy.logits(hidden, "text")
        drawn = policy.lm.prepare_embeddings_for_image_generation(codes - vocabulary.grid.offset)
        head = policy.logits(hidden, "image")
    torch.testing.assert_close(ours[..., : theirs.shape[-1]], theirs)
    assert policy.embed(codes).equal(drawn)
    assert head[..., vocabulary.grid.offset :].equal(model.generation_head(hidden))
    assert ours.shape == head.shape == (1, ids.shape[1], vocabulary.size)


def test_guidance_contrasts_with_pads_of_the_same_length(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    prompt = toy.make_prompts("image")[1]
    ids, unconditional = policy.prompt_ids(prompt), policy.unconditional_ids(prompt)
    assert unconditional == [ids[0], *[policy.vocabulary.pad] * (len(ids) - 2), ids[-1]]


def test_samples_of_one_prompt_share_its_pictures(toy: SimpleNamespace) -> None:
    """One picture, two, none: features go to the rows of their own prompt."""
    policy = make_janus(toy)
    images = np.stack([toy.picture(n) for n in range(3)])
    shown = [images[:1], images[1:], None]
    prompts = [
        Prompt(key=f"p{n}", direction="image", caption="black", context_images=part)
        for n, part in enumerate(shown)
    ]
    pictures = policy.pictures(prompts)
    assert pictures is not None and pictures.shape == (3, 3, toy.SIDE, toy.SIDE)
    drawn = draw(policy, prompts, random_numbers(policy, prompts, group=2))
    torch.testing.assert_close(score(policy, drawn).logprobs, drawn.logprobs, atol=1e-5, rtol=0)
    alone = draw(policy, prompts[1:2], random_numbers(policy, prompts, group=2)[1:2])
    assert alone.responses.equal(drawn.responses[2:4])
    turned = score(policy, drawn, pictures=pictures.flip(0))
    assert (turned.logprobs - drawn.logprobs)[:4].abs().max() > 1e-4
    torch.testing.assert_close(turned.logprobs[4:], drawn.logprobs[4:], atol=1e-5, rtol=0)
    with pytest.raises(
        ConfigError, match=r"places for \[1, 1, 2, 2, 0, 0\] pictures .* 2 pictures were given"
    ):
        score(policy, drawn, pictures=pictures[:2])


def test_the_placeholder_is_never_written(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    assert not policy.allowed("text")[policy.picture_id]
    assert not policy.allowed("text")[len(policy.vocabulary.tokenizer) :].any()


def test_encoder_and_picture_model_are_frozen(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    trained = {id(parameter) for parameter in policy.trained_parameters()}
    names = [name for name, parameter in policy.lm.named_parameters() if id(parameter) in trained]
    assert not [name for name in names if "vision_model" in name or "vqmodel" in name]
    assert {"model.generation_head.vision_head.weight", "model.aligner.fc1.weight"} <= set(names)


def test_its_own_picture_model_draws_its_codes(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    tokenizer = policy.image_tokenizer()
    prompts = toy.make_prompts("image")
    drawn = draw(policy, prompts, random_numbers(policy, prompts, group=1))
    pixels = tokenizer.decode(policy.vocabulary.codes(drawn.responses))
    assert pixels.shape == (4, 3, toy.SIDE, toy.SIDE)


def test_load_policy_tells_the_classes_apart(toy: SimpleNamespace, tmp_path: Path) -> None:
    make_janus(toy).save(tmp_path / "janus")
    toy.make_policy().save(tmp_path / "lm")
    assert type(load_policy(tmp_path / "janus")) is JanusPolicy
    assert type(load_policy(tmp_path / "lm")) is type(toy.make_policy())
    with pytest.raises(ConfigError, match=r"no config.json"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"offset": 11}, r"image codes start at id 11, the text head has \d+ ids; set the grid's offset to"),
        ({"num_codes": 7}, r"2 x 2 places for 7 codes, the VQ model of this Janus 2 x 2 for 8"),
        ({"rows": 3}, r"3 x 2 places"),
    ],
)
def test_a_grid_of_another_model_is_refused(toy: SimpleNamespace, grid: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_janus(toy, **grid)


def test_a_picture_that_is_missing_or_of_another_size_is_refused(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    with pytest.raises(ConfigError, match=r"^p: a prompt that is answered with text needs its picture"):
        policy.prompt_ids(Prompt(key="p", direction="text", caption="black"))
    large = Prompt(key="p", direction="text", caption="black", image=np.zeros((9, 9, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"takes pictures of 8 x 8 pixels, found \(9, 9, 3\)"):
        policy.pictures([large])


def test_the_trainer_runs_both_stages_on_it(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Supervised warm-up, then rollouts, rewards and updates through both heads."""
    policy = make_janus(toy)
    heads = [policy.lm.lm_head.weight, policy.lm.model.generation_head.vision_head.weight]
    before = [head.detach().clone() for head in heads]
    train_supervised(policy, repeat(toy.make_prompts("image")), steps=2, text_fraction=1.0)
    stages = [replace(stage, steps=1, replay_prompts=4) for stage in toy.STAGES]
    trainer = toy.make_trainer(tmp_path, toy_store, policy=policy, stages=stages)
    trainer.train()
    lines = [line for line in toy.metrics_of(tmp_path) if line["kind"] == "train"]
    assert [line["direction"] for line in lines] == ["text", "image"]
    assert all(line["rollout/logprob_gap_max"] < 1e-5 for line in lines)
    assert not any(old.equal(new) for old, new in zip(before, heads, strict=True))


def test_a_copy_for_an_engine_is_whole_and_proven(toy: SimpleNamespace) -> None:
    policy = make_janus(toy)
    engine = NativeEngine(policy, own_weights=True)
    engine.sync(policy, 2)
    engine.prove()
    assert engine.last_sync is not None and engine.last_sync.probe_s > 0
    assert engine.last_sync.num_tensors == len(policy.lm.state_dict())
