"""The policy: a plain causal language model over one joint vocabulary of words and image codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from unirl.algorithms.sampling import token_logprobs
from unirl.errors import ConfigError
from unirl.policies.critic import ValueHead
from unirl.policies.vocabulary import JointVocabulary
from unirl.types import Direction, Prompt

__all__ = ["PolicyConfig", "PolicyOutput", "TokenLM"]

CRITIC_FILE = "critic.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Size of a policy that starts from random weights. The defaults are the toy size, about 0.7M."""

    width: int = 128
    num_layers: int = 3
    num_heads: int = 4
    mlp_width: int = 384
    max_length: int = 160
    """Positions, prompt and response together."""

    def llama(self, vocabulary: JointVocabulary) -> LlamaConfig:
        """The configuration of transformers' class. No dropout anywhere."""
        return LlamaConfig(
            vocab_size=vocabulary.size,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.max_length,
            pad_token_id=vocabulary.pad,
            bos_token_id=vocabulary.bos,
            eos_token_id=vocabulary.eos,
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What one forward pass says about given responses."""

    logprobs: Tensor
    """float32 (B, T), nats."""
    entropy: Tensor
    """float32 (B, T), nats, of the whole distribution at each position."""
    values: Tensor
    """float32 (B, T), reward units: the value before the token at this position is chosen."""


class TokenLM(nn.Module):
    """A causal LM with its vocabulary, its grammar and its critic.

    Any transformers causal LM serves, as long as its embedding covers the vocabulary. The model is put in
    evaluation mode and stays there: dropout would make the sampled and the trained distribution differ.
    """

    def __init__(self, lm: PreTrainedModel, vocabulary: JointVocabulary) -> None:
        super().__init__()
        held = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
        if held < vocabulary.size:
            raise ConfigError(
                f"the model embeds {held} ids, the vocabulary has {vocabulary.size}; resize its embeddings"
            )
        self.lm = lm
        self.critic = ValueHead(lm.config.hidden_size)
        self.vocabulary = vocabulary
        for direction in ("text", "image"):
            mask = torch.zeros(held, dtype=torch.bool)
            mask[: vocabulary.size] = vocabulary.allowed(direction)
            self.register_buffer(f"allowed_{direction}", mask, persistent=False)
        self.eval()

    @classmethod
    def create(cls, config: PolicyConfig, vocabulary: JointVocabulary, *, seed: int) -> TokenLM:
        """Make a Llama with random weights that depend on nothing but the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(LlamaForCausalLM(config.llama(vocabulary)), vocabulary)

    def train(self, mode: bool = True) -> TokenLM:
        """Stay in evaluation mode whatever is asked; gradients do not need training mode."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm.device

    def allowed(self, direction: Direction) -> Tensor:
        """bool (V,), True on the ids that a response in this direction may hold."""
        mask: Tensor = getattr(self, f"allowed_{direction}")
        return mask

    def max_response_length(self, direction: Direction, max_words: int) -> int:
        """T: max_words words and `<eos>`, or the whole grid of codes."""
        return self.vocabulary.grid.length if direction == "image" else max_words + 1

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of one prompt: the picture to describe, or the words to draw and `<boi>`."""
        vocabulary = self.vocabulary
        if prompt.direction == "image":
            return [vocabulary.bos, *vocabulary.words(prompt.caption), vocabulary.begin_image]
        if prompt.codes is None:
            raise ConfigError(f"{prompt.key}: a prompt that is answered with text needs its picture's codes")
        return [vocabulary.bos, *vocabulary.picture(prompt.codes.tolist())]

    def response_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of the true response, for supervised training: the words and `<eos>`, or the codes."""
        vocabulary = self.vocabulary
        if prompt.direction == "text":
            words = vocabulary.words(prompt.caption)
            if vocabulary.tokenizer.unk_token_id in words:
                raise ConfigError(
                    f"{prompt.key}: caption {prompt.caption!r} has a word that the vocabulary lacks, so it "
                    "cannot be written; build the vocabulary from captions that hold every word"
                )
            return [*words, vocabulary.eos]
        if prompt.codes is None:
            raise ConfigError(f"{prompt.key}: supervised drawing needs the true picture's codes")
        return vocabulary.picture(prompt.codes.tolist())[1:-1]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        prompt_length: int,
        direction: Direction,
        temperature: float = 1.0,
    ) -> PolicyOutput:
        """Score given responses.

        Args:
            input_ids: int64 (B, L + T), prompts padded on the left, responses on the right.
            attention_mask: bool (B, L + T).
            prompt_length: L.
            direction: Which ids the responses may hold.
            temperature: The one that the responses were sampled at.
        """
        positions = (attention_mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        hidden = self.lm.base_model(
            input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=positions, use_cache=False
        ).last_hidden_state[:, prompt_length - 1 : -1]
        logprobs, entropy = token_logprobs(
            self.lm.lm_head(hidden),
            input_ids[:, prompt_length:],
            allowed=self.allowed(direction),
            temperature=temperature,
        )
        return PolicyOutput(logprobs=logprobs, entropy=entropy, values=self.critic(hidden))

    def save(self, directory: Path) -> None:
        """Write the model as transformers does, the tokenizer, the grid and the critic (safetensors)."""
        directory.mkdir(parents=True, exist_ok=True)
        self.lm.save_pretrained(directory)
        self.vocabulary.save(directory)
        save_file(self.critic.state_dict(), directory / CRITIC_FILE)

    @classmethod
    def load(cls, directory: Path) -> TokenLM:
        """Read what `save` wrote, or any causal LM of transformers with an image grid beside it."""
        policy = cls(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            JointVocabulary.load(directory),
        )
        if (directory / CRITIC_FILE).is_file():
            policy.critic.load_state_dict(load_file(directory / CRITIC_FILE))
        return policy


def left_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack token lists, padded on the left; return int64 (B, L) ids and bool (B, L) mask."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(length) >= (length - lengths)[:, None]
