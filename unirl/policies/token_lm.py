"""The policy: a plain causal language model over one joint vocabulary of words and image codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from unirl.config import require_positive
from unirl.errors import ConfigError
from unirl.policies.policy import EVERY_ID, Policy
from unirl.policies.vocabulary import JointVocabulary
from unirl.types import Direction

__all__ = ["PolicyConfig", "TokenLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Size of a policy that starts from random weights. The defaults are the toy size, about 0.7M."""

    width: int = 128
    num_layers: int = 3
    num_heads: int = 4
    mlp_width: int = 384
    max_length: int = 160
    """Positions, prompt and response together."""

    def __post_init__(self) -> None:
        require_positive(self)
        if self.width % (2 * self.num_heads):
            raise ConfigError(
                f"policy: {self.num_heads} heads share a width of {self.width}; wanted an even number of "
                f"channels a head, so a multiple of {2 * self.num_heads}"
            )

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


class TokenLM(Policy):
    """A causal LM whose own vocabulary holds the image codes.

    Any transformers causal LM serves, as long as its embedding covers the vocabulary and its logits are those
    of its head, scaled or soft-capped as its configuration says.
    """

    def __init__(self, lm: PreTrainedModel, vocabulary: JointVocabulary) -> None:
        held = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
        if held < vocabulary.size:
            raise ConfigError(
                f"the model embeds {held} ids, the vocabulary has {vocabulary.size}; resize its embeddings"
            )
        super().__init__(lm, vocabulary, num_ids=held)
        self._head_rules = _head_rules(lm.config)
        _require_same_logits(self)

    @classmethod
    def create(cls, config: PolicyConfig, vocabulary: JointVocabulary, *, seed: int) -> TokenLM:
        """Make a Llama with random weights that depend on nothing but the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(LlamaForCausalLM(config.llama(vocabulary)), vocabulary)

    @property
    def decoder_config(self) -> PretrainedConfig:
        """Configuration of the whole model: it is its own decoder."""
        return self.lm.config

    def embed(self, ids: Tensor, pictures: Tensor | None = None) -> Tensor:
        """Look ids up; pictures are never given, since this policy reads them as codes."""
        vectors: Tensor = self.lm.get_input_embeddings()(ids)
        return vectors

    @property
    def trunk(self) -> nn.Module:
        """The language model without its head."""
        return self.lm.base_model

    def logits(self, hidden: Tensor, direction: Direction, ids: slice = EVERY_ID) -> Tensor:
        """Apply the rows of the head that are asked for, and the configuration's scale and soft cap."""
        head = cast(nn.Module, self.lm.get_output_embeddings())
        if type(head) is nn.Linear:
            logits = F.linear(hidden, head.weight[ids], None if head.bias is None else head.bias[ids])
        else:
            logits = head(hidden)[..., ids]
        return self._head_rules(logits)

    @classmethod
    def load(
        cls, directory: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> TokenLM:
        """Read what `save` wrote, or any causal LM of transformers with an image grid beside it.

        Raises:
            ConfigError: If there is no image grid.
        """
        vocabulary = JointVocabulary.load(directory)
        lm = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
        return cls(lm, vocabulary)._load_critic(directory)


@dataclass(frozen=True, slots=True)
class _HeadRules:
    """What some classes do to the logits of their head: z <- cap * tanh(scale * z / cap)."""

    scale: float
    cap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _head_rules(config: PretrainedConfig) -> _HeadRules:
    """Read scale (Cohere multiplies, Granite divides) and soft cap (Gemma) from a configuration."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return _HeadRules(scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def _require_same_logits(policy: TokenLM) -> None:
    """Refuse a class that makes its logits in a way that `TokenLM.logits` does not know."""
    if policy.device.type == "meta":
        return
    ids = torch.arange(min(8, policy.vocabulary.size), device=policy.device)[None]
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1], device=policy.device)[None]
    theirs = policy.lm(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    hidden = policy.backbone(policy.embed(ids), attention_mask=mask, positions=positions)
    gap = float((policy.logits(hidden, "text") - theirs).abs().max())
    if gap > 1e-3 * max(1.0, float(theirs.abs().max())):
        raise ConfigError(
            f"{type(policy.lm).__name__}: logits differ by {gap:.3g} from those of the class itself, so it "
            "does something to its head that is not known here; see the supported classes in docs/policies.md"
        )
