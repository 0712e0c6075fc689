"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import xxhash

from unirl.errors import ConfigError, RewardError
from unirl.rewards.normalization import Normalization, RunningMoments, normalized
from unirl.types import Reward, Sample, Scores

__all__ = ["AdaptiveReward", "Ensemble", "Member"]


@runtime_checkable
class AdaptiveReward(Reward, Protocol):
    """A reward with statistics of the training so far, which a checkpoint must hold."""

    def adapt(self, scores: Scores) -> None:
        """Take in what the reward said of training samples."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One reward of an ensemble, and how its total enters the sum."""

    reward: Reward
    weight: float = 1.0
    """0: only watched. Negative: a penalty."""
    normalization: Normalization = "none"
    """"none"; "running": by mean and deviation of all training samples so far; "group": by those of the
    samples of one prompt; "rank": place among the samples of one prompt, from 0 to 1."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value, after the normalisation."""


class Ensemble:
    """Bring several rewards to one scale and add them by weight, or take the worst.

    With v[m, b] the total of member m for sample b, normalised and clipped as `Member` says, over the members
    with a weight that scored sample b:

        sum:    total[b] = W / W_b * sum_m weight_m v[m, b] - disagreement_penalty * std_m v[m, b]
        worst:  total[b] = min_m v[m, b] - disagreement_penalty * std_m v[m, b]

    W is the sum of all absolute weights and W_b that of the members that scored sample b, so that a missing
    member is left out and the scale stays. Where no member with a weight has a score, the total is NaN. The
    deviation is that of the population, 0 for one member.

    Components are the members' own totals, before any normalisation.

    Args:
        members: Name -> `Member`, or (reward, weight). A member's total becomes the component with its name;
            its other components become "<name>/<component>".
        combine: "sum" or "worst". The worst of several rewards is what a policy can hack least.
        disagreement_penalty: 0 or more, in units of the normalised values.

    Raises:
        ConfigError: If no member has a weight, a clip has no room, or the worst is to be taken of a penalty.
    """

    def __init__(
        self,
        members: Mapping[str, Member | tuple[Reward, float]],
        *,
        combine: Literal["sum", "worst"] = "sum",
        disagreement_penalty: float = 0.0,
    ) -> None:
        self.members = {
            name: member if isinstance(member, Member) else Member(reward=member[0], weight=member[1])
            for name, member in members.items()
        }
        self.combine = combine
        self.disagreement_penalty = disagreement_penalty
        wrong = list(self._wrong())
        if wrong:
            raise ConfigError("ensemble: " + "; ".join(wrong))
        self.moments = {
            name: RunningMoments()
            for name, member in self.members.items()
            if member.normalization == "running"
        }

    def _wrong(self) -> list[str]:
        wrong = []
        if not any(member.weight for member in self.members.values()):
            wrong.append(f"{len(self.members)} members, none with a weight; give one a weight")
        if not self.disagreement_penalty >= 0:
            wrong.append(f"disagreement_penalty is {self.disagreement_penalty}, wanted 0 or more")
        if self.combine not in ("sum", "worst"):
            wrong.append(f'combine is "{self.combine}", wanted "sum" or "worst"')
        for name, member in self.members.items():
            if member.clip is not None and not member.clip[0] < member.clip[1]:
                wrong.append(f"{name}: clip is {member.clip}, wanted (low, high) with low < high")
            if self.combine == "worst" and member.weight < 0:
                wrong.append(f"{name}: weight {member.weight} under 0; the worst of penalties means nothing")
        return wrong

    @property
    def identity(self) -> str:
        """Another string where a member or a setting differs.

        Raises:
            ConfigError: If a member has no identity of its own.
        """
        digest = xxhash.xxh3_128(f"{self.combine} {self.disagreement_penalty}".encode())
        for name, member in self.members.items():
            own = getattr(member.reward, "identity", None)
            if own is None:
                raise ConfigError(f"ensemble: {name} has no `identity`, so its scores cannot be kept")
            text = f" {name} {own} {member.weight} {member.normalization} {member.clip}"
            digest.update(text.encode())
        return f"ensemble/{digest.hexdigest()}"

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples with every member, in their order. Changes nothing: see `adapt`.

        "group" and "rank" see the samples of one call that share a key, so a prompt's samples must be scored
        together; alone, a sample gets 0 and 0.5.

        Raises:
            RewardError: If a member scored another number of samples, or its failures exceed its own budget.
        """
        components: dict[str, np.ndarray] = {}
        values = np.full((len(self.members), len(samples)), np.nan)
        keys = [sample.key for sample in samples]
        for number, (name, member) in enumerate(self.members.items()):
            scores = member.reward.score(samples)
            if scores.total.shape != (len(samples),):
                raise RewardError(f"reward {name}: scores {scores.total.shape}, wanted ({len(samples)},)")
            components[name] = scores.total
            for part, own in scores.components.items():
                if part != name:
                    components[f"{name}/{part}"] = own
            scaled = normalized(scores.total, member.normalization, keys, self.moments.get(name))
            values[number] = scaled if member.clip is None else np.clip(scaled, *member.clip)
        return Scores(total=self._total(values), components=components)

    def adapt(self, scores: Scores) -> None:
        """Take the scores of one training step, of all ranks together, into the running statistics.

        Scoring itself leaves them alone, so that an evaluation does not move the scale of the training.
        """
        for name, moments in self.moments.items():
            moments.add(scores.components[name])

    def state_dict(self) -> dict[str, Any]:
        """The running statistics, as plain values for a checkpoint."""
        return {name: asdict(moments) for name, moments in self.moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ConfigError: If it belongs to other members.
        """
        if state.keys() != self.moments.keys():
            raise ConfigError(
                f"ensemble: state of {', '.join(state) or 'no member'}, "
                f"running statistics of {', '.join(self.moments) or 'no member'}"
            )
        self.moments = {name: RunningMoments(**values) for name, values in state.items()}

    def _total(self, values: np.ndarray) -> np.ndarray:
        """Float64 (B,) from the values of all members, (M, B)."""
        weights = np.array([member.weight for member in self.members.values()])
        values, weights = values[weights != 0], weights[weights != 0]
        known = ~np.isnan(values)
        count = known.sum(axis=0)
        total = np.full(values.shape[1], np.nan)
        if self.combine == "worst":
            lowest = np.where(known, values, np.inf).min(axis=0)
            total[count > 0] = lowest[count > 0]
        else:
            present = np.abs(weights) @ known
            summed = weights @ np.where(known, values, 0.0)
            np.divide(summed * np.abs(weights).sum(), present, out=total, where=count > 0)
        if self.disagreement_penalty:
            mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1)
            squares = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0) / np.maximum(count, 1)
            total -= self.disagreement_penalty * np.sqrt(squares)
        return total
