"""Models with random weights, of the same classes as the real ones and small enough for a test.

What `--tiny` runs starts from these: every line of a recipe is executed, and nothing is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    LlamaConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from recipes.worlds.shapes import all_captions
from unirl.policies.image_tokenizer import ImageTokenizer, ImageTokenizerConfig
from unirl.policies.janus import JanusPolicy
from unirl.policies.token_lm import PolicyConfig, TokenLM
from unirl.policies.vocabulary import ImageGrid, JointVocabulary, word_tokenizer
from unirl.rewards import Question, VlmConfig
from unirl.rewards.preference import PreferenceModel
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import build_model, build_tokenizer

__all__ = ["QUESTIONS", "TinyJanus", "TinyJoint"]

SIDE = 32
NUM_CODES = 16
SHOWN = "<image_placeholder>"
QUESTIONS = ("what colour is it ?", "what shape is it ?")
WORDS = (*all_captions(), *QUESTIONS)
"""Every word that the models may read or write: those of the shapes, and questions about them."""
TINY_VLM = VlmConfig(width=64, num_layers=1, vision_width=32, vision_layers=1, mlp_width=64, patch_size=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJanus:
    """`policy`, a Janus; `vqa`, a Qwen2.5-VL; `preference`, one with a head; `similarity`, a CLIP."""

    def write(self, directory: Path, *, seed: int) -> None:
        """Write the four folders."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _janus(WORDS).save(directory / "policy")
            _clip(WORDS, directory / "similarity")
        _rewards(WORDS, directory, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyJoint:
    """`policy`, a Llama with image codes; `tokenizer`, its VQ model; rewards as `TinyJanus`."""

    def write(self, directory: Path, *, seed: int) -> None:
        """Write the folders."""
        config = ImageTokenizerConfig(image_size=SIDE, num_codes=NUM_CODES, fold=8)
        vocabulary = JointVocabulary.from_captions(
            WORDS, num_codes=NUM_CODES, rows=config.grid_size, columns=config.grid_size
        )
        sizes = PolicyConfig(width=64, num_layers=1, num_heads=2, mlp_width=64, max_length=96)
        TokenLM.create(sizes, vocabulary, seed=seed).save(directory / "policy")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ImageTokenizer(JanusVQVAE(config.janus())).save(directory / "tokenizer")
            _clip(WORDS, directory / "similarity")
        _rewards(WORDS, directory, seed)


def _janus(captions: Sequence[str]) -> JanusPolicy:
    """Pictures of 32 x 32 pixels are 16 codes to draw, and 16 vectors to see."""
    words = word_tokenizer(captions)
    words.add_special_tokens({"additional_special_tokens": [SHOWN]})
    vq = JanusVQVAEConfig(
        embed_dim=4,
        num_embeddings=NUM_CODES,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1,
        latent_channels=32,
        num_patches=SIDE // 8,
        projection_dim=32,
        image_token_embed_dim=32,
    )
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=words.pad_token_id,
        ),
        vision_config=JanusVisionConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=8,
            projection_dim=32,
            num_image_tokens=16,
        ),
        vq_config=vq,
        image_token_id=words.get_vocab()[SHOWN],
        tie_word_embeddings=False,
    )
    grid = ImageGrid(offset=len(words), num_codes=NUM_CODES, rows=vq.num_patches, columns=vq.num_patches)
    return JanusPolicy(JanusForConditionalGeneration(config), JointVocabulary(words, grid))


def _rewards(captions: Sequence[str], directory: Path, seed: int) -> None:
    """A yes/no reward, and a preference reward of the same size."""
    question = Question(image_size=(SIDE, SIDE))
    tokenizer = build_tokenizer(question, captions)
    model = build_model(TINY_VLM, tokenizer, question=question, seed=seed)
    trunk = QuestionModel(model, tokenizer, question)
    trunk.save(directory / "vqa")
    question.save(directory / "vqa")
    PreferenceModel(trunk, seed=seed).save(directory / "preference")
    question.save(directory / "preference")


def _clip(captions: Sequence[str], directory: Path) -> None:
    tokenizer = build_tokenizer(Question(), captions)
    tokenizer.padding_side = "right"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 24,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = CLIPConfig(
        text_config={**sizes, **text},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 16},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    ).save_pretrained(directory)
