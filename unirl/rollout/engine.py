"""What a rollout engine is: requests in, samples out, with everything that a replay or a hand-over needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Protocol, get_args

import numpy as np
import torch

from unirl.algorithms.sampling import sampling_errors
from unirl.errors import ConfigError, RolloutError
from unirl.policies.padding import left_pad
from unirl.policies.policy import Policy
from unirl.types import MODALITIES, Direction, Prompt, Rollout, SamplingSettings, TokenOrigin

__all__ = [
    "PartialSample",
    "RolloutEngine",
    "RolloutRequest",
    "assemble",
    "begin",
    "require_alike",
    "require_same_sampling",
    "sample_seed",
    "sample_uniforms",
]

_MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """G samples for each of P prompts of one direction."""

    prompts: Sequence[Prompt]
    group_size: int
    max_new_tokens: int
    """T. A text response is cut there; a picture has exactly that many tokens."""
    seeds: Sequence[tuple[int, ...]]
    """One for each prompt, for example (run seed, step, number of the prompt); non-negative. The random
    numbers of sample g are a function of (seed, g) alone, whatever the batch, the rank or the engine's other
    work."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    @property
    def direction(self) -> Direction:
        """What all prompts ask for."""
        return self.prompts[0].direction

    def check(self) -> None:
        """Refuse a request that cannot be served.

        Raises:
            ConfigError: With everything that is wrong.
        """
        wrong = sampling_errors(
            {"temperature": self.sampling.temperature, "guidance": self.sampling.guidance}
        )
        if not self.prompts:
            wrong.append("there is no prompt; give at least one")
        if len(self.seeds) != len(self.prompts):
            wrong.append(f"{len(self.seeds)} seeds for {len(self.prompts)} prompts; give one for each")
        wrong.extend(
            f"{prompt.key}: seed {seed!r}; a seed is made of integers from 0"
            for prompt, seed in zip(self.prompts, self.seeds, strict=False)
            if not isinstance(seed, Sequence) or not seed or not all(_is_whole(number, 0) for number in seed)
        )
        if not _is_whole(self.group_size, 1) or not _is_whole(self.max_new_tokens, 1):
            wrong.append(
                f"group_size is {self.group_size!r} and max_new_tokens {self.max_new_tokens!r}; "
                "both are integers of 1 or more"
            )
        if self.prompts and self.direction not in get_args(Direction):
            wrong.append(f"{self.prompts[0].key}: direction {self.direction!r}; wanted text or image")
        wrong.extend(
            f"{prompt.key}: direction {prompt.direction!r}, the first prompt's is {self.direction!r}; "
            "roll out one direction at a time"
            for prompt in self.prompts
            if prompt.direction != self.direction
        )
        if wrong:
            raise ConfigError("\n".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSample:
    """A sample on its way: all that any engine with the same weights needs to go on with it.

    The random numbers are no part of it: number t of the stream of (seed, sample) decides token t.
    """

    prompt: Prompt
    seed: tuple[int, ...]
    """Of the prompt."""
    sample: int
    """g, its number within the group."""
    max_new_tokens: int
    sampling: SamplingSettings
    ids: tuple[int, ...] = ()
    """Tokens so far."""
    logprobs: tuple[float, ...] = ()
    """Of each token, nats, when it was drawn."""
    versions: tuple[int, ...] = ()
    """Policy version that drew each token."""
    is_ended: bool = False
    """The last token is the end token."""

    def extended(
        self, ids: Sequence[int], logprobs: Sequence[float], *, version: int, is_ended: bool
    ) -> PartialSample:
        """Return the sample with tokens that weights of one version drew."""
        return replace(
            self,
            ids=(*self.ids, *ids),
            logprobs=(*self.logprobs, *logprobs),
            versions=self.versions + (version,) * len(ids),
            is_ended=is_ended,
        )

    @property
    def is_done(self) -> bool:
        """Nothing is left to draw."""
        return self.is_ended or len(self.ids) >= self.max_new_tokens

    @property
    def is_cut(self) -> bool:
        """A text that reached the limit without an end. A picture is never cut."""
        return self.is_done and not self.is_ended and self.prompt.direction == "text"


class RolloutEngine(Protocol):
    """Anything that samples from the policy."""

    policy_version: int
    """Of the weights that it samples with."""

    def sync(self, policy: Policy, version: int) -> None:
        """Take over the policy's present weights; everything sampled from now on is of this version."""
        ...

    def rollout(self, request: RolloutRequest) -> Rollout:
        """Serve a request in one go."""
        ...

    def close(self) -> None:
        """Give back what the engine holds; it is not used again."""
        ...


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= least


def sample_uniforms(seed: Sequence[int], num_samples: int, length: int) -> np.ndarray:
    """Draw the random numbers of each sample from a stream of its own.

    Args:
        seed: What the draw depends on, for example (run seed, step, prompt). Non-negative.
        num_samples: G.
        length: T.

    Returns:
        float64 (G, T) in [0, 1). Row g depends on `seed` and g alone, not on the batch or the rank; a longer
        row begins alike.
    """
    return np.stack([sample_stream(seed, g, length) for g in range(num_samples)])


def sample_stream(seed: Sequence[int], sample: int, length: int) -> np.ndarray:
    """Draw float64 (T,), row `sample` of `sample_uniforms`."""
    sequence = np.random.SeedSequence([*seed, sample])
    return np.random.Generator(np.random.Philox(sequence)).random(length)


def sample_seed(seed: Sequence[int], sample: int) -> int:
    """Give the seed of one sample to an engine that takes one integer, in [0, 2**63)."""
    return int(np.random.SeedSequence([*seed, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def begin(request: RolloutRequest) -> list[PartialSample]:
    """Return the request's P x G samples before their first token, prompt by prompt.

    Raises:
        ConfigError: As `RolloutRequest.check`.
    """
    request.check()
    return [
        PartialSample(
            prompt=prompt,
            seed=tuple(seed),
            sample=g,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
        )
        for prompt, seed in zip(request.prompts, request.seeds, strict=True)
        for g in range(request.group_size)
    ]


def require_alike(samples: Sequence[PartialSample], policy: Policy) -> None:
    """Refuse samples that one run of an engine cannot go on with together.

    Args:
        samples: Of a run.
        policy: Goes on with them.

    Raises:
        ConfigError: If two have other directions or settings, a picture is to have another length, or a
            sample is not in itself consistent or holds what this policy cannot have drawn.
    """
    picture_length = policy.vocabulary.grid.response_length
    for sample in samples:
        place, direction = f"{sample.prompt.key}, sample {sample.sample}", sample.prompt.direction
        first = samples[0]
        if (direction, sample.sampling) != (first.prompt.direction, first.sampling):
            raise ConfigError(
                f"{place}: {direction} under {sample.sampling}, the first sample is "
                f"{first.prompt.direction} under {first.sampling}; run them one after the other"
            )
        if direction == "image" and sample.max_new_tokens != picture_length:
            raise ConfigError(
                f"{place}: {sample.max_new_tokens} tokens are asked for, a picture has {picture_length}"
            )
        if (broken := _inconsistency(sample, policy.vocabulary.eos)) is not None:
            raise ConfigError(f"{place}: {broken}; it was changed on its way, begin it anew")
        if not sample.ids or sample.is_done:
            continue
        if (wrong := policy.first_forbidden(direction, sample.ids)) is not None:
            raise ConfigError(
                f"{place}: its token {wrong} is {sample.ids[wrong]}, which may not stand there in {direction}"
                " of this policy; it was begun by another model, begin it anew"
            )


def _inconsistency(sample: PartialSample, eos: int) -> str | None:
    """What no engine hands over, in words."""
    ids, num_ids = sample.ids, len(sample.ids)
    if not num_ids == len(sample.logprobs) == len(sample.versions):
        return f"{num_ids} tokens, {len(sample.logprobs)} log-probs and {len(sample.versions)} versions"
    if num_ids > sample.max_new_tokens:
        return f"{num_ids} tokens of {sample.max_new_tokens} at most"
    if not all(isinstance(token, Integral) and abs(token) <= _MAX_ID for token in ids):
        return f"its tokens {ids[:4]} are not all ids"
    if sample.prompt.direction == "image":
        return "a picture that ended with a token" if sample.is_ended else None
    if (eos in ids[:-1]) or sample.is_ended != (ids[-1:] == (eos,)):
        return f"is_ended is {sample.is_ended} with {ids.count(eos)} end tokens ({eos}) among {num_ids}"
    return None


def assemble(
    samples: Sequence[PartialSample],
    prompt_ids: Sequence[Sequence[int]],
    *,
    group_size: int,
    pad: int,
    device: torch.device | str = "cpu",
    active_rows: Sequence[int] = (),
    decode_s: float = 0.0,
) -> Rollout:
    """Put finished samples together: prompts padded on the left, responses on the right.

    Args:
        samples: B = P x G, in the order of `begin`, all done.
        prompt_ids: P, tokens of each prompt.
        group_size: G.
        pad: Id that fills.
        device: Where the rollout is wanted.
        active_rows: Rows that were running at each decode step.
        decode_s: Wall time of the engine.

    Raises:
        RolloutError: If a sample is not done, or one was drawn under other settings than the first.
    """
    first = samples[0]
    for sample in samples:
        if not sample.is_done:
            raise RolloutError(
                f"{sample.prompt.key}, sample {sample.sample}: {len(sample.ids)} of {sample.max_new_tokens} "
                "tokens and no end; let an engine go on with it first"
            )
        if sample.sampling != first.sampling or sample.max_new_tokens != first.max_new_tokens:
            raise RolloutError(
                f"{sample.prompt.key}, sample {sample.sample}: drawn under {sample.sampling} with "
                f"{sample.max_new_tokens} tokens at most, the first sample under {first.sampling} with "
                f"{first.max_new_tokens}"
            )
    ids, mask = left_pad(prompt_ids, pad)
    ids, mask = ids.repeat_interleave(group_size, dim=0), mask.repeat_interleave(group_size, dim=0)
    shape = (len(samples), first.max_new_tokens)
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    response_mask = torch.arange(first.max_new_tokens) < lengths[:, None]
    responses, logprobs = torch.full(shape, pad), torch.zeros(shape)
    versions = torch.zeros(shape, dtype=torch.int32)
    responses[response_mask] = torch.tensor([i for sample in samples for i in sample.ids])
    logprobs[response_mask] = torch.tensor([p for sample in samples for p in sample.logprobs])
    versions[response_mask] = torch.tensor([v for s in samples for v in s.versions], dtype=torch.int32)
    return Rollout(
        prompts=tuple(sample.prompt for sample in samples[::group_size]),
        group_size=group_size,
        input_ids=torch.cat([ids, responses], dim=1).to(device),
        attention_mask=torch.cat([mask, response_mask], dim=1).to(device),
        prompt_length=ids.shape[1],
        response_mask=response_mask.to(device),
        old_logprobs=logprobs.to(device),
        truncated=torch.tensor([sample.is_cut for sample in samples]).to(device),
        origin=TokenOrigin.constant(
            shape,
            direction=first.prompt.direction,
            sampling=first.sampling,
            policy_version=versions,
            device=device,
        ),
        active_rows=tuple(active_rows),
        decode_s=decode_s,
    )


def require_same_sampling(rollout: Rollout, sampling: SamplingSettings) -> None:
    """Refuse to score a rollout's tokens under settings that they were not drawn under.

    Raises:
        RolloutError: With the token and both values.
    """
    origin, mask = rollout.origin, rollout.response_mask
    wanted = {
        "temperature": (origin.temperature, sampling.temperature),
        "guidance": (origin.guidance, sampling.guidance),
        "modality": (origin.modality, float(MODALITIES.index(rollout.direction))),
    }
    for name, (drawn, replayed) in wanted.items():
        differs = mask & (drawn != torch.tensor(replayed, dtype=drawn.dtype, device=drawn.device))
        if bool(differs.any()):
            row, token = differs.nonzero()[0].tolist()
            found, asked = drawn[row, token].item(), replayed
            raise RolloutError(
                f"{rollout.prompts[row // rollout.group_size].key}, row {row}, token {token}: drawn at "
                f"{name} {_shown(name, found)}, replayed at {_shown(name, asked)}; the log-probs would be "
                "those of another distribution. Score it under the settings that it was drawn with"
            )


def _shown(name: str, value: float) -> str:
    return MODALITIES[int(value)] if name == "modality" else f"{value:g}"
