"""Pairs of samples in a run's experience that are worth a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final, Literal

import numpy as np

from datapipe.decode import decode_image
from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.rewards.preference_pairs import PreferencePair
from unirl.types import Sample

__all__ = ["STRATEGIES", "Strategy", "mine_pairs"]

Strategy = Literal["group", "uncertainty", "components", "judge"]
REWARD, JUDGE = "reward", "judge"
BESIDE = ("_mass", "_tokens")
"""Ends of the names of what a reward says beside its score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The samples of one prompt: their places in the view, and their scores."""

    rows: np.ndarray
    scores: Mapping[str, np.ndarray]


_Found = tuple[float, int, int]
"""How much a pair is worth a label, and the two places in its group."""


def mine_pairs(
    run_or_store: str | Path,
    *,
    strategy: Strategy,
    num_pairs: int,
    where: str | None = None,
) -> list[PreferencePair]:
    """Pick the pairs of a run's experience from which a reward would learn most, one for each group at most.

    A group are the samples of one prompt: in one training step for "group", "uncertainty" and "components",
    over all evaluations for "judge".

    - "group": the best and the worst of a group by the reward, widest gap first.
    - "uncertainty": the two whose rewards are nearest, so that the reward cannot tell them apart.
    - "components": the two that two components of the reward order in opposite ways, both as surely as
      possible; differences are measured in the component's own deviation over all samples.
    - "judge": the two that reward and held-out judge order in opposite ways.

    Args:
        run_or_store: A run's directory, or its experience store.
        strategy: What makes a pair worth a label.
        num_pairs: The most to pick.
        where: SQL condition over the experience, for example "stage = 'image' and step > 40".

    Raises:
        ConfigError: If there is no experience, the strategy is unknown, or "components" has fewer than two.
        StorageError: If the condition is no SQL.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is {strategy!r}, wanted one of {', '.join(STRATEGIES)}")
    path = Path(run_or_store)
    path = path / "experience" if (path / "experience").is_dir() else path
    store = FeatureStore.open(path)
    kind = "eval" if strategy == "judge" else "train"
    view = store.select(f"kind = '{kind}' and ({where or 'true'})", order_by="key")
    scores = {name: _numbers(view, name) for name in store.columns if _is_score(name)}
    if strategy == "components" and len(_components(scores)) < 2:
        raise ConfigError(f"{path}: {len(_components(scores))} components of the reward, wanted two or more")
    spreads = {name: _spread(values) for name, values in scores.items()}
    found = []
    for group in _groups(view, scores, by_step=strategy != "judge"):
        best = max(STRATEGIES[strategy](group, spreads), default=None)
        if best is not None:
            found.append((best[0], group, best[1:]))
    found.sort(key=lambda item: (-item[0], int(item[1].rows[0])))
    return [
        _pair(view, group, places, f"{strategy} {worth:.4g}") for worth, group, places in found[:num_pairs]
    ]


def _best_and_worst(group: _Group, spreads: Mapping[str, float]) -> Iterator[_Found]:
    reward = group.scores[REWARD]
    if np.isfinite(reward).sum() > 1:
        best, worst = int(np.nanargmax(reward)), int(np.nanargmin(reward))
        if reward[best] > reward[worst]:
            yield float(reward[best] - reward[worst]), best, worst


def _nearest(group: _Group, spreads: Mapping[str, float]) -> Iterator[_Found]:
    reward = group.scores[REWARD]
    for one, other in combinations(np.flatnonzero(np.isfinite(reward)).tolist(), 2):
        yield -abs(float(reward[one] - reward[other])), one, other


def _opposed(group: _Group, spreads: Mapping[str, float], names: Sequence[str]) -> Iterator[_Found]:
    """Pairs that two of the named scores order in opposite ways, by the surer half of the doubt."""
    for name, rival in combinations(names, 2):
        first = group.scores[name] / spreads[name]
        second = group.scores[rival] / spreads[rival]
        for one, other in combinations(range(len(group.rows)), 2):
            gaps = first[one] - first[other], second[one] - second[other]
            if gaps[0] * gaps[1] < 0:
                yield float(min(map(abs, gaps))), one, other


def _components_opposed(group: _Group, spreads: Mapping[str, float]) -> Iterator[_Found]:
    yield from _opposed(group, spreads, _components(group.scores))


def _judge_opposed(group: _Group, spreads: Mapping[str, float]) -> Iterator[_Found]:
    yield from _opposed(group, spreads, (REWARD, JUDGE))


STRATEGIES: Final[Mapping[str, Callable[[_Group, Mapping[str, float]], Iterator[_Found]]]] = {
    "group": _best_and_worst,
    "uncertainty": _nearest,
    "components": _components_opposed,
    "judge": _judge_opposed,
}


def _is_score(name: str) -> bool:
    return name in (REWARD, JUDGE) or name.startswith(f"{REWARD}/")


def _components(scores: Mapping[str, object]) -> list[str]:
    """Scores of the members; what a member says beside its score, such as its mass, is no opinion."""
    return [n for n in scores if n.startswith(f"{REWARD}/") and n.count("/") == 1 and not n.endswith(BESIDE)]


def _numbers(view: View, name: str) -> np.ndarray:
    return np.asarray(view.column(name).to_numpy(zero_copy_only=False), np.float64)


def _spread(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.std()) if len(known) and known.std() > 0 else 1.0


def _groups(view: View, scores: Mapping[str, np.ndarray], *, by_step: bool) -> Iterator[_Group]:
    """Samples of one prompt, those with the same picture and words taken once."""
    prompts, steps = view.column("prompt_key").to_pylist(), view.column("step").to_pylist()
    directions = view.column("direction").to_pylist()
    rows: dict[tuple[object, ...], list[int]] = {}
    for row, (prompt, step, direction) in enumerate(zip(prompts, steps, directions)):
        rows.setdefault((prompt, direction, step if by_step else None), []).append(row)
    hashes, responses = view.column("hash").to_pylist(), view.column("response").to_pylist()
    for members in rows.values():
        different = list({(hashes[row], responses[row]): row for row in reversed(members)}.values())[::-1]
        if len(different) > 1:
            places = np.array(different)
            yield _Group(rows=places, scores={name: values[places] for name, values in scores.items()})


def _pair(view: View, group: _Group, places: tuple[int, int], why: str) -> PreferencePair:
    """The pair, with the two in the order of their keys: who labels must not see which scored higher."""
    first, second = sorted(places)
    samples = [_sample(view, int(group.rows[place])) for place in (first, second)]
    keys = [view.store.key(int(view.rows[group.rows[place]])) for place in (first, second)]
    scores = {
        name: [float(v) if np.isfinite(v := values[place]) else None for place in (first, second)]
        for name, values in group.scores.items()
    }
    return PreferencePair(
        pair=f"{keys[0]}|{keys[1]}", first=samples[0], second=samples[1], why=why, scores=scores
    )


def _sample(view: View, row: int) -> Sample:
    one = view[np.array([row])]
    fields = {n: one.column(n)[0].as_py() for n in ("direction", "prompt_key", "target", "response")}
    return Sample(
        key=fields["prompt_key"],
        direction=fields["direction"],
        caption=fields["response"] if fields["direction"] == "text" else fields["target"],
        image=decode_image(view.store.blob(int(view.rows[row]))),
        target=fields["target"],
    )
