from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.rewards import PreferencePair, mine_pairs, read_pairs, write_pairs

NAN = float("nan")


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups of one step, and one prompt in two evaluations. The red value names the sample."""
    train = {
        ("p", 1): [(0.9, 0.9, 0.1), (0.2, 0.2, 0.9), (0.5, 0.5, 0.5), (NAN, NAN, 0.5), (0.5, 0.5, 0.5)],
        ("q", 1): [(0.4, 0.1, 0.2), (0.41, 0.11, 0.21), (0.8, 0.9, 0.95)],
        ("same", 1): [(0.1, 0.1, 0.1), (0.9, 0.9, 0.9)],
    }
    evals = {("p", 0): (0.9, 0.0), ("p", 1): (0.3, 1.0), ("q", 0): (0.2, 0.0), ("q", 1): (0.8, 1.0)}
    fields = {"direction": "image", "target": "a cat", "response": ""}
    scores = {"reward": "float", "reward/a": "float", "reward/b": "float", "judge": "float"}
    value = 0
    with FeatureStore.create(tmp_path / "run" / "experience").writer(
        message="rows", columns=scores
    ) as writer:
        for (prompt, step), rows in train.items():
            for number, (total, one, other) in enumerate(rows):
                value += prompt != "same"
                key = f"train/{step}/{prompt}/{number}"
                named = {"reward": total, "reward/a": one, "reward/b": other, "judge": NAN}
                writer.add(key, png(value), kind="train", prompt_key=prompt, step=step, **named, **fields)
        for (prompt, step), (total, judged) in evals.items():
            value += 1
            named = {"reward": total, "reward/a": total, "reward/b": total, "judge": judged}
            key = f"eval/{step}/{prompt}"
            writer.add(key, png(value), kind="eval", prompt_key=prompt, step=step, **named, **fields)
    return tmp_path / "run"


def named(pairs: list[PreferencePair]) -> list[tuple[str, int, int]]:
    return [(p.prompt, int(p.first.image[0, 0, 0]), int(p.second.image[0, 0, 0])) for p in pairs]


def test_best_and_worst_of_a_group_widest_gap_first(run: Path) -> None:
    """Two samples with the same picture are one, and NaN is neither best nor worst."""
    found = mine_pairs(run, strategy="group", num_pairs=10)
    assert named(found) == [("p", 1, 2), ("q", 6, 8)]
    assert found[0].scores["reward"] == [0.9, 0.2]
    assert found[0].scores["judge"] == [None, None]
    assert (found[0].first.caption, found[0].label, found[0].why) == ("a cat", None, "group 0.7")
    assert named(mine_pairs(run, strategy="group", num_pairs=1)) == [("p", 1, 2)]
    assert named(mine_pairs(run, strategy="group", num_pairs=9, where="prompt_key = 'q'")) == [("q", 6, 8)]


def test_what_the_reward_cannot_tell_apart(run: Path) -> None:
    assert named(mine_pairs(run, strategy="uncertainty", num_pairs=10)) == [("p", 3, 5), ("q", 6, 7)]


def test_what_components_order_in_opposite_ways(run: Path) -> None:
    assert named(mine_pairs(run, strategy="components", num_pairs=10)) == [("p", 1, 2)]


def test_where_reward_and_judge_part(run: Path) -> None:
    """Of prompt p the reward fell from 0.9 to 0.3 while the judge came to agree; of q both rose."""
    assert named(mine_pairs(run, strategy="judge", num_pairs=10)) == [("p", 9, 10)]


def test_an_unknown_strategy_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="wanted one of group, uncertainty, components, judge"):
        mine_pairs(run, strategy="luck", num_pairs=1)  # type: ignore[arg-type]


def test_mined_pairs_go_to_disk_and_back(run: Path, tmp_path: Path) -> None:
    found = mine_pairs(run, strategy="group", num_pairs=10)
    write_pairs(found, tmp_path / "pairs")
    assert named(read_pairs(tmp_path / "pairs")) == named(found)
