"""The map of the domain: what one stage of the loop hands to the next.

The data moves from top to bottom: a `Prompt` is rolled out into a `Rollout`; the rollout's samples go to
a reward as `Sample`s and come back as `Scores`; scores and values become an `Experience`, which the update
consumes.

Axes: P prompts, G samples per prompt, B = P * G rows ordered prompt-major (row b belongs to prompt b // G),
L prompt tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "MODALITIES",
    "CriticKind",
    "Direction",
    "Experience",
    "Judge",
    "Prompt",
    "Reward",
    "Rollout",
    "Sample",
    "SamplingSettings",
    "Scores",
    "TokenOrigin",
]

Direction = Literal["text", "image"]
"""What the policy writes: "text" reads a picture and writes words, "image" reads words and draws."""
CriticKind = Literal["shared", "own"]
"""Where the critic's hidden states come from: the policy's trunk, or a trunk of its own."""
MODALITIES: tuple[Direction, ...] = get_args(Direction)
"""What a token can be; `TokenOrigin.modality` holds places in this list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy is conditioned on, before it is turned into tokens.

    Example: `Prompt(key="numbers/0042", direction="image", caption="a handwritten forty two", codes=None)`.
    """

    key: str
    """Key of the row in the data store."""
    direction: Direction
    caption: str
    """True caption. Shown to the policy when it draws; the answer to find when it writes."""
    codes: np.ndarray | None = None
    """Image codes, integers (rows * columns,), each in [0, num_codes). Needed when the policy writes text."""
    image: np.ndarray | None = None
    """uint8 (H, W, 3) RGB, what the reward sees. Needed when the policy writes text."""
    context_codes: np.ndarray | None = None
    """Integers (N, rows * columns): codes of the pictures or the frames of a clip that the policy is shown
    first, in order. With direction "image" the drawing starts from them."""
    context_images: np.ndarray | None = None
    """uint8 (N, H, W, 3) RGB of the same, for a policy that reads pixels and for rewards."""
    question: str = ""
    """With direction "text": what is asked, shown behind the pictures; `caption` is the answer to find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """What turns the policy's logits into the distribution that tokens are drawn from and scored under.

    Checked where it is used, see `unirl.algorithms.sampling_errors`.
    """

    temperature: float = 1.0
    """Logits are divided by it; above 0."""
    guidance: float = 1.0
    """s in uncond + s (cond - uncond), on logits; 1 is the conditional branch alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrigin:
    """Under what each response token was drawn, (B, T) each. Values off the response mask mean nothing."""

    modality: Tensor
    """int8, place in `MODALITIES`."""
    temperature: Tensor
    """float32."""
    guidance: Tensor
    """float32."""
    policy_version: Tensor
    """int32, of the weights. Within a row it can rise: a sample can be stopped and go on after an update."""

    @classmethod
    def constant(
        cls,
        shape: tuple[int, int],
        *,
        direction: Direction,
        sampling: SamplingSettings,
        policy_version: int | Tensor,
        device: torch.device | str = "cpu",
    ) -> TokenOrigin:
        """Say the same of all tokens of a rollout; the version can be int32 (B, T)."""
        return cls(
            modality=torch.full(shape, MODALITIES.index(direction), dtype=torch.int8, device=device),
            temperature=torch.full(shape, sampling.temperature, dtype=torch.float32, device=device),
            guidance=torch.full(shape, sampling.guidance, dtype=torch.float32, device=device),
            policy_version=torch.as_tensor(policy_version, dtype=torch.int32, device=device)
            .expand(shape)
            .contiguous(),
        )

    def select(self, rows: Tensor) -> TokenOrigin:
        """Take some of the rows, int64 (N,)."""
        return TokenOrigin(
            modality=self.modality[rows],
            temperature=self.temperature[rows],
            guidance=self.guidance[rows],
            policy_version=self.policy_version[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """G samples for each of P prompts, as tokens. Filled by the rollout engine.

    Prompts are padded on the left and responses on the right, so that column L is the first response token
    of every row.
    """

    prompts: Sequence[Prompt]
    """P prompts, one for each group of G rows."""
    group_size: int
    input_ids: Tensor
    """int64 (B, L + T), padded prompt then padded response."""
    attention_mask: Tensor
    """bool (B, L + T), True on real tokens."""
    prompt_length: int
    """L."""
    response_mask: Tensor
    """bool (B, T), True on tokens that the policy chose."""
    old_logprobs: Tensor
    """float32 (B, T), nats, under the distribution that was sampled from; 0 where the mask is False."""
    truncated: Tensor
    """bool (B,), True where the response was cut by the length limit rather than ended."""
    origin: TokenOrigin
    """Modality, temperature, guidance and policy version of every response token. A replay checks them."""
    active_rows: Sequence[int] = ()
    """Rows still running at each decode step: the long tail, seen over time."""
    decode_s: float = 0.0
    """Wall time of the engine for this rollout."""

    @property
    def direction(self) -> Direction:
        """What all its prompts ask for."""
        return self.prompts[0].direction

    @property
    def lengths(self) -> Tensor:
        """int64 (B,), response tokens of each row."""
        return self.response_mask.sum(dim=1)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens over the engine's time; NaN if no time was measured."""
        return int(self.response_mask.sum()) / self.decode_s if self.decode_s else float("nan")

    @property
    def response_ids(self) -> Tensor:
        """int64 (B, T), the response part of `input_ids`."""
        return self.input_ids[:, self.prompt_length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished output as a reward or a judge sees it: a picture and the words that belong to it."""

    key: str
    """Key of the prompt in the data store."""
    direction: Direction
    caption: str
    """Words that go with the picture: the response in direction "text", the prompt in direction "image"."""
    image: np.ndarray
    """uint8 (H, W, 3) RGB: the prompt's picture in direction "text", the drawing in direction "image"."""
    target: str
    """True caption of the prompt."""
    more_images: Sequence[np.ndarray] = ()
    """uint8 (H, W, 3) RGB each: other pictures that the words are about, after `image`."""
    clip: np.ndarray | None = None
    """uint8 (F, H, W, 3) RGB: a video clip that the words are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One score per sample and component. NaN means "could not be scored"; it is never replaced by 0."""

    total: np.ndarray
    """float64 (B,), what the policy is trained on."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float64 (B,) each, by the component's name."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Scores of the samples of all parts, in their order; all parts have the same components."""
        return cls(
            total=np.concatenate([part.total for part in parts]),
            components={
                name: np.concatenate([part.components[name] for part in parts])
                for name in parts[0].components
            },
        )


class Reward(Protocol):
    """Anything that scores samples. Trained on, so it must never be used as the judge."""

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order."""
        ...


class Judge(Protocol):
    """A held-out measure of success. Never a reward, never trained on what it judges."""

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return float64 (B,): 1.0 where picture and words agree, 0.0 where not, NaN where it cannot tell."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout with everything that the update needs. Filled by the trainer."""

    rollout: Rollout
    scores: Scores
    old_logprobs: Tensor
    """float32 (B, T), what the ratio compares with: the rollout's, or the trainer's own from before the
    update, where importance weights cover the way from the engine to there."""
    importance: Tensor | None = None
    """float32 (B, T), weights that correct for what the engine drew from; None where nothing is corrected."""
    ref_logprobs: Tensor | None
    """float32 (B, T), of the frozen reference; None where nothing depends on them."""
    old_values: Tensor
    """float32 (B, T), the critic's values before the update, in reward units; 0 without a critic."""
    loss_mask: Tensor
    """bool (B, T), the response mask without the rows that could not be scored."""
    advantages: Tensor
    """float32 (B, T), whitened over the whole batch; 0 where the mask is False."""
    returns: Tensor
    """float32 (B, T), regression target of the critic."""
