"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unirl.errors import ConfigError, RewardError
from unirl.types import Reward, Sample, Scores

__all__ = ["WeightedSum"]


class WeightedSum:
    """Add rewards by weight: total[b] = W / W_b * sum over members with a score of weight * total.

    W is the sum of all absolute weights and W_b that of the members that scored sample b, so that a missing
    member is left out and the scale stays. Where no member with a weight has a score, the total is NaN. A
    member of weight 0 is only watched.

    Args:
        members: Name -> (reward, weight). A member's total becomes the component with its name; its other
            components become "<name>/<component>".

    Raises:
        ConfigError: If there is no member, or none with a weight other than 0.
    """

    def __init__(self, members: Mapping[str, tuple[Reward, float]]) -> None:
        if not any(weight for _, weight in members.values()):
            raise ConfigError(f"WeightedSum: {len(members)} members, none with a weight; give one a weight")
        self.members = dict(members)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples with every member, in their order.

        Raises:
            RewardError: If a member scored another number of samples, or its failures exceed its own budget.
        """
        components: dict[str, np.ndarray] = {}
        weighted = np.zeros(len(samples))
        present = np.zeros(len(samples))
        for name, (reward, weight) in self.members.items():
            scores = reward.score(samples)
            if scores.total.shape != (len(samples),):
                raise RewardError(f"reward {name}: scores {scores.total.shape}, wanted ({len(samples)},)")
            components[name] = scores.total
            for part, values in scores.components.items():
                if part != name:
                    components[f"{name}/{part}"] = values
            has_score = ~np.isnan(scores.total)
            weighted[has_score] += weight * scores.total[has_score]
            present[has_score] += abs(weight)
        whole = sum(abs(weight) for _, weight in self.members.values())
        total = np.full(len(samples), np.nan)
        np.divide(weighted * whole, present, out=total, where=present > 0)
        return Scores(total=total, components=components)
