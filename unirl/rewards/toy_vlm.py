"""A Qwen2.5-VL at toy size: the real architecture, a vocabulary made of the captions' own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from unirl.config import require_positive
from unirl.errors import ConfigError
from unirl.rewards.question import CAPTION, IMAGE_TOKEN, VIDEO_TOKEN, Question
from unirl.words import apart, split_words

__all__ = ["VLLM_TOY", "VlmConfig", "build_model", "build_tokenizer"]

PAD, UNKNOWN, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, BOS, EOS, VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmConfig:
    """Sizes of the toy model. The defaults give about 0.43 million parameters."""

    width: int = 96
    """Width of the language model; each head takes width / num_heads, a multiple of 8."""
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_width: int = 256
    vision_width: int = 64
    vision_layers: int = 3
    vision_heads: int = 4
    vision_mlp_width: int = 128
    patch_size: int = 4
    """Pixels on a side; `merge_size` x `merge_size` patches become one token of the language model."""
    merge_size: int = 2
    initializer_range: float = 0.05
    """Standard deviation of the weights at the start; the 0.02 of wide models learns slowly at this width."""

    def __post_init__(self) -> None:
        require_positive(self)
        if self.width % (8 * self.num_heads) or self.vision_width % (4 * self.vision_heads):
            raise ConfigError(
                f"reward model: {self.num_heads} heads share {self.width}, {self.vision_heads} in vision "
                f"share {self.vision_width}; wanted a multiple of 8 channels a head, in vision of 4"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"reward model: {self.num_heads} heads cannot share {self.num_kv_heads} heads of keys and "
                "values; wanted a divisor"
            )


VLLM_TOY = VlmConfig(num_heads=3, num_kv_heads=1)
"""Three heads of 32 channels instead of four of 24, which vLLM on a CPU refuses; as large otherwise."""


def build_tokenizer(question: Question, captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a word tokenizer from the words of the captions, the question and its answers.

    Words are what whitespace separates, in the case in which they are written, and single characters in
    scripts without spaces (`unirl.words`); any other word is `<unk>`.
    """
    asked = question.template.replace(CAPTION, " ")
    for token in SPECIAL_TOKENS:
        asked = asked.replace(token, " ")
    words = {"yes", "no", *split_words(asked)}
    words.update(word for caption in captions for word in split_words(caption))
    vocabulary = [*SPECIAL_TOKENS, *sorted(words - set(SPECIAL_TOKENS))]
    ids = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = apart(symbols=False)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(
    config: VlmConfig, tokenizer: PreTrainedTokenizerFast, *, question: Question, seed: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Make the model with fresh weights that depend on `seed` only; the global generator is left alone."""
    token_id: dict[str, int] = tokenizer.get_vocab()
    head_half = config.width // config.num_heads // 2
    side_section = head_half * 3 // 8  # rotary channels of rows, of columns; time takes the rest
    model_config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": config.width,
            "intermediate_size": config.mlp_width,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "max_position_embeddings": question.max_tokens,
            "initializer_range": config.initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [head_half - 2 * side_section, side_section, side_section],
            },
            "bos_token_id": token_id[BOS],
            "eos_token_id": token_id[EOS],
            "pad_token_id": token_id[PAD],
        },
        vision_config={
            "depth": config.vision_layers,
            "hidden_size": config.vision_width,
            "intermediate_size": config.vision_mlp_width,
            "num_heads": config.vision_heads,
            "patch_size": config.patch_size,
            "spatial_merge_size": config.merge_size,
            "temporal_patch_size": 2,
            "window_size": max(question.image_size),
            "out_hidden_size": config.width,
            "fullatt_block_indexes": list(range(config.vision_layers)),
            "initializer_range": config.initializer_range,
        },
        image_token_id=token_id[IMAGE_TOKEN],
        video_token_id=token_id[VIDEO_TOKEN],
        vision_start_token_id=token_id[VISION_START],
        vision_end_token_id=token_id[VISION_END],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(model_config)
