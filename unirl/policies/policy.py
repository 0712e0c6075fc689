"""What a policy is to the rest of the system: tokens in and out, and one function that scores them.

Every policy speaks one joint id space, text ids and then image codes, whatever its model is made of. The
engine and the trainer see `embed`, `backbone` and `logits`, and never the model's own classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig, PreTrainedModel

from unirl.algorithms.sampling import token_logprobs
from unirl.errors import ConfigError
from unirl.policies.adapters import merged_weights
from unirl.policies.chunks import score_in_chunks
from unirl.policies.critic import OwnCritic, ValueHead, run_trunk
from unirl.policies.dropout import silence_dropout
from unirl.policies.padding import token_positions
from unirl.policies.rms_norm import take_over_norms
from unirl.policies.vocabulary import JointVocabulary
from unirl.types import CriticKind, Direction, Prompt

__all__ = ["EVERY_ID", "Policy", "PolicyOutput"]

CRITIC_FILE = "critic.safetensors"
DIRECTIONS: tuple[Direction, ...] = ("text", "image")
EVERY_ID = slice(None)
"""All V of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What one forward pass says about given responses."""

    logprobs: Tensor
    """float32 (B, T), nats."""
    entropy: Tensor
    """float32 (B, T), nats, of the whole distribution at each position."""
    values: Tensor
    """float32 (B, T), reward units: the value before the token at this position is chosen."""


class Policy(nn.Module, ABC):
    """A model of transformers with its vocabulary, its grammar and its critic.

    The model is put in evaluation mode and stays there, and its dropout is set to 0: dropout would make the
    sampled and the trained distribution differ. V, the last axis of logits, may be larger than the
    vocabulary; ids beyond it are never allowed.
    """

    lm: PreTrainedModel
    vocabulary: JointVocabulary
    critic: ValueHead | OwnCritic
    logits_chunk: int
    """Positions, rows times response tokens, whose logits `forward` holds at once; 0 holds all."""

    def __init__(self, lm: PreTrainedModel, vocabulary: JointVocabulary, *, num_ids: int) -> None:
        """Take a model over.

        Args:
            lm: The model; any device and dtype.
            vocabulary: Text ids, image codes and the grammar.
            num_ids: V.
        """
        super().__init__()
        self.lm = lm
        self.logits_chunk = 0
        self.vocabulary = vocabulary
        self.critic = ValueHead(self.decoder_config.hidden_size)
        for direction in DIRECTIONS:
            grammar = vocabulary.grammar(direction)
            masks = torch.zeros(grammar.masks.shape[0], num_ids, dtype=torch.bool)
            masks[:, : vocabulary.size] = grammar.masks
            self.register_buffer(f"masks_{direction}", masks.to(lm.device), persistent=False)
            self.register_buffer(f"places_{direction}", grammar.places.to(lm.device), persistent=False)
        silence_dropout(lm)
        take_over_norms(lm)
        self.eval()

    @property
    @abstractmethod
    def decoder_config(self) -> PretrainedConfig:
        """Configuration of the decoder, for transformers' caches."""

    @abstractmethod
    def embed(self, ids: Tensor, pictures: Tensor | None = None) -> Tensor:
        """Turn ids (B, L) into vectors (B, L, D).

        Args:
            ids: int64 (B, L), of prompts, of responses or of both.
            pictures: What `pictures` gave for the prompts of these rows; the rows may be the prompts or, in
                order, the G samples of each.
        """

    @property
    @abstractmethod
    def trunk(self) -> nn.Module:
        """The transformers model without its head."""

    def backbone(
        self, embeds: Tensor, *, attention_mask: Tensor, positions: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Return hidden states (B, T, D) behind the last norm.

        Args:
            embeds: (B, T, D).
            attention_mask: bool or int (B, past + T), or a 4-D mask as transformers takes it.
            positions: int64 (B, T).
            cache: Of transformers; the new keys and values are added to it.
        """
        return run_trunk(self.trunk, embeds, attention_mask=attention_mask, positions=positions, cache=cache)

    @abstractmethod
    def logits(self, hidden: Tensor, direction: Direction, ids: slice = EVERY_ID) -> Tensor:
        """Return logits (..., V), or those of some ids, of hidden states (..., D).

        They are before temperature and grammar. Those of ids that the direction does not allow mean nothing.
        """

    @classmethod
    @abstractmethod
    def load(
        cls, directory: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> Self:
        """Read what `save` wrote, or a model of transformers with an image grid beside it.

        Args:
            directory: The checkpoint.
            dtype: Of the model's weights. The critic stays in float32.
            attention: transformers' name of the attention implementation; None takes its choice.
        """

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode whatever is asked; gradients do not need training mode."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.lm.dtype

    def allowed(self, direction: Direction) -> Tensor:
        """True on the ids that a response may hold: bool (V,), or (T, V) where that depends on the place."""
        masks: Tensor = getattr(self, f"masks_{direction}")
        places: Tensor = getattr(self, f"places_{direction}")
        return masks[places] if len(places) else masks[0]

    def allowed_at(self, direction: Direction, place: int) -> Tensor:
        """bool (V,): True on the ids that may stand at this place of a response, counted from 0."""
        masks: Tensor = getattr(self, f"masks_{direction}")
        places: Tensor = getattr(self, f"places_{direction}")
        return masks[places[place]] if len(places) else masks[0]

    def first_forbidden(self, direction: Direction, ids: Sequence[int]) -> int | None:
        """The first place of a response, counted from 0, whose id may not stand there; None if all may."""
        masks: Tensor = getattr(self, f"masks_{direction}")
        places: Tensor = getattr(self, f"places_{direction}")
        drawn = torch.tensor(ids, dtype=torch.int64, device=masks.device)
        kinds = places[: len(ids)] if len(places) else torch.zeros_like(drawn)
        is_known = (drawn >= 0) & (drawn < masks.shape[1])
        is_wrong = ~(is_known & masks[kinds, drawn.where(is_known, 0)])
        return int(is_wrong.int().argmax()) if is_wrong.any() else None

    def id_span(self, direction: Direction) -> slice:
        """From the first id that a response may hold to the last; logits of the others are not needed."""
        masks: Tensor = getattr(self, f"masks_{direction}")
        ids = masks.any(dim=0).nonzero()
        return slice(int(ids[0]), int(ids[-1]) + 1) if len(ids) else slice(0, masks.shape[1])

    def max_response_length(self, direction: Direction, max_words: int) -> int:
        """T: max_words words and `<eos>`, or the whole grid."""
        return self.vocabulary.grid.response_length if direction == "image" else max_words + 1

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of one prompt: the pictures that it shows, then its question, or words and `<boi>`."""
        vocabulary = self.vocabulary
        if prompt.direction == "image":
            words = vocabulary.words(prompt.caption)
            return [vocabulary.bos, *self._shown_ids(prompt), *words, *vocabulary.start_of_picture]
        return [vocabulary.bos, *self._shown_ids(prompt), *vocabulary.words(prompt.question)]

    def unconditional_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of the prompt without its conditions, words and pictures: what guidance contrasts with."""
        vocabulary = self.vocabulary
        start = vocabulary.start_of_picture if prompt.direction == "image" else []
        return [vocabulary.bos, *start]

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
        return vocabulary.drawing(prompt.codes.tolist())

    def pictures(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """What a vision encoder must see for the prompts: float (N, 3, H, W) in order, None for nothing."""
        return None

    def picture_key(self, prompt: Prompt) -> str:
        """Tells apart prompts of equal tokens that show different pictures; "" if the tokens say it all."""
        return ""

    def _shown_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of the pictures that a prompt shows, as their codes."""
        shown = [] if prompt.context_codes is None else prompt.context_codes.tolist()
        if prompt.direction == "text" and prompt.codes is not None:
            shown.append(prompt.codes.tolist())
        if prompt.direction == "text" and not shown:
            raise ConfigError(f"{prompt.key}: a prompt that is answered with text needs its picture's codes")
        return [i for codes in shown for i in self.vocabulary.picture(codes)]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        prompt_length: int,
        direction: Direction,
        temperature: float = 1.0,
        guidance: float = 1.0,
        unconditional: tuple[Tensor, Tensor] | None = None,
        detach_uncond: bool = False,
        pictures: Tensor | None = None,
        entropy_gradient: bool = True,
        with_values: bool = True,
    ) -> PolicyOutput:
        """Score given responses.

        Args:
            input_ids: int64 (B, L + T), prompts padded on the left, responses on the right.
            attention_mask: bool (B, L + T).
            prompt_length: L.
            direction: Which ids the responses may hold.
            temperature: The one that the responses were sampled at.
            guidance: The one that the responses were sampled with.
            unconditional: Unconditional prompts of the rows, int64 and bool (B, U), padded on the left.
                Needed if guidance is not 1: the same responses are run behind them too.
            detach_uncond: Let no gradient into the unconditional branch.
            pictures: What `pictures` gave for the rows' prompts.
            entropy_gradient: Whether the entropy is learned from; see `token_logprobs`.
            with_values: Ask the critic. Without it values are 0, with a gradient of 0 for the critic.
        """
        responses = input_ids[:, prompt_length:]
        vectors = self.embed(input_ids, pictures)
        hidden = self._behind_prompt(vectors, attention_mask, prompt_length)
        uncond = None
        if unconditional is not None:
            prompts, mask = unconditional
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_uncond):
                uncond = self._behind_prompt(
                    self.embed(torch.cat([prompts, responses], dim=1)),
                    torch.cat([mask, attention_mask[:, prompt_length:]], dim=1),
                    prompts.shape[1],
                )
        ids = self.id_span(direction)
        allowed = self.allowed(direction)[..., ids]
        allowed = allowed[: hidden.shape[1]] if allowed.ndim == 2 else allowed
        places = responses - ids.start
        is_inside = (places >= 0) & (places < allowed.shape[-1])
        places = torch.where(is_inside, places, 0)

        def score(start: int, end: int, hidden: Tensor, uncond: Tensor | None) -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_uncond):
                base = None if uncond is None else self.logits(uncond, direction, ids)
            return token_logprobs(
                self.logits(hidden, direction, ids),
                places[:, start:end],
                allowed=allowed[start:end] if allowed.ndim == 2 else allowed,
                temperature=temperature,
                uncond=base,
                guidance=guidance,
                entropy_gradient=entropy_gradient,
            )

        logprobs, entropy = score_in_chunks(score, hidden, uncond, positions=self.logits_chunk)
        logprobs = torch.where(is_inside, logprobs, -torch.inf)
        if with_values:
            values = self._values(hidden, vectors, attention_mask, prompt_length)
        else:
            # One position: ranks wait for a gradient of every parameter.
            values = self._values(hidden[:1, :1], hidden[:1, :1], attention_mask.new_ones(1, 1), 0)
            values = (0.0 * values).expand(hidden.shape[:2])
        return PolicyOutput(logprobs=logprobs, entropy=entropy, values=values)

    def _behind_prompt(self, vectors: Tensor, mask: Tensor, prompt_length: int) -> Tensor:
        """Hidden states (B, T, D) that the T response tokens are drawn from."""
        hidden = self.backbone(vectors, attention_mask=mask, positions=token_positions(mask))
        return hidden[:, prompt_length - 1 : -1]

    def _values(self, hidden: Tensor, vectors: Tensor, mask: Tensor, prompt_length: int) -> Tensor:
        """Values (B, T) off the policy's hidden states, or off the critic's own. Neither is moved by them."""
        if isinstance(self.critic, OwnCritic):
            values: Tensor = self.critic(
                vectors, attention_mask=mask, positions=token_positions(mask), behind=prompt_length
            )
        else:
            values = self.critic(hidden.detach())
        return values

    def take_critic(self, kind: CriticKind) -> None:
        """Have a critic of this kind: the one that is there, if it is, or a new one.

        A new one of its own begins with the policy's trunk as it is now. Before sharding.
        """
        wanted, width = OwnCritic if kind == "own" else ValueHead, self.decoder_config.hidden_size
        if not isinstance(self.critic, wanted):
            own = OwnCritic(self.trunk, width=width) if kind == "own" else ValueHead(width)
            self.critic = own.to(self.device).eval()

    def apart(self) -> list[nn.Module]:
        """Modules that `forward` does not run, such as a picture model: each is called by itself."""
        return []

    def sometimes(self) -> list[nn.Parameter]:
        """Trained parameters that a forward pass may leave out, as those of one direction."""
        return []

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the actor's optimizer takes. The critic's parameters are not among them."""
        return [parameter for parameter in self.lm.parameters() if parameter.requires_grad]

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's optimizer takes."""
        return [parameter for parameter in self.critic.parameters() if parameter.requires_grad]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as a checkpoint of transformers has them, with a tied head a second time.

        LoRA adapters are merged in. Sharded tensors are gathered one at a time, so every rank must go through
        the iterator.
        """
        yield from merged_weights(self.lm)

    def save(self, directory: Path, *, is_writer: bool = True) -> None:
        """Write the model as transformers does, the tokenizer, the grid and the critic (safetensors).

        LoRA adapters are merged in: what is written is a plain model. See `save_adapters` for them alone.

        Args:
            directory: Made if it is not there.
            is_writer: False on ranks that only help to gather sharded weights.
        """
        weights = dict(self.weights())
        critic = dict(merged_weights(self.critic))
        if not is_writer:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.lm.save_pretrained(directory, state_dict=weights)
        self.vocabulary.save(directory)
        save_file(critic, directory / CRITIC_FILE)

    def _load_critic(self, directory: Path) -> Self:
        if (directory / CRITIC_FILE).is_file():
            tensors = load_file(directory / CRITIC_FILE)
            self.take_critic("own" if any(name.startswith("trunk.") for name in tensors) else "shared")
            self.critic.load_state_dict(tensors)
        return self
