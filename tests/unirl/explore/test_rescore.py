from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.explore import Scores, agreement_matrix, calibration, rescore
from unirl.rewards.cache import CachedReward
from unirl.types import Sample
from unirl.types import Scores as RewardScores


class Brightness:
    """Scores a sample by its picture and keeps the size of each call."""

    identity = "brightness/1"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def score(self, samples: Sequence[Sample]) -> RewardScores:
        self.calls.append([sample.key for sample in samples])
        return RewardScores(total=np.array([sample.image.mean() for sample in samples]))


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 9, 9)).save(buffer, format="PNG")
    return buffer.getvalue()


def contents(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_finished_run_gets_another_column_and_stays_as_it_was(run_dir: Path) -> None:
    before = contents(run_dir)
    scores = rescore(run_dir, Brightness(), name="bright")
    assert contents(run_dir) == before
    assert len(scores) == 108 and "reward/bright" in scores.measures
    for row in scores.best(3, by="reward/bright").to_pylist():
        assert row["reward/bright"] == np.asarray(scores.picture(row["key"])).mean()


def test_everything_knows_the_new_column(scores: Scores) -> None:
    again = rescore(scores.where("kind = 'eval'"), Brightness())
    assert len(again) == 36
    some = again.where("reward/again > 100 and stage = 'start'")
    assert 0 < len(some) <= 12
    assert {row["first"] for row in again.agreement().to_pylist()} >= {"reward/again"}
    assert sum(calibration(again, "reward/again")["num"].to_pylist()) == 36
    assert len(agreement_matrix(again).axes[0].get_xticks()) == 5
    twice = rescore(again, Brightness(), name="third")
    assert twice.query("SELECT count(*) AS n FROM samples WHERE reward/again = reward/third")[
        "n"
    ].to_pylist() == [36]


def test_the_samples_of_a_prompt_reach_the_reward_together(scores: Scores) -> None:
    reward = Brightness()
    rescore(scores.where("kind = 'train' and step = 1"), reward, batch_size=4)
    assert reward.calls == [["p0"] * 3, ["p1"] * 3, ["p2"] * 3]


def test_words_are_those_that_were_scored(scores: Scores) -> None:
    seen: list[Sample] = []

    class Look(Brightness):
        def score(self, samples: Sequence[Sample]) -> RewardScores:
            seen.extend(samples)
            return super().score(samples)

    rescore(scores.where("step = 1 and kind = 'train'"), Look())
    rows = scores.where("step = 1 and kind = 'train'").query("SELECT response FROM samples ORDER BY key")
    assert sorted(sample.caption for sample in seen) == sorted(rows["response"].to_pylist())


def test_a_cached_reward_is_asked_once(scores: Scores, tmp_path: Path) -> None:
    some, reward = scores.where("kind = 'eval'"), Brightness()
    first = rescore(some, CachedReward(reward, tmp_path / "cache"))
    calls = len(reward.calls)
    second = rescore(some, CachedReward(reward, tmp_path / "cache"))
    assert len(reward.calls) == calls > 0
    assert first.to_arrow(["reward/again"]).equals(second.to_arrow(["reward/again"]))


def test_a_sample_without_a_readable_picture_has_no_score(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "experience")
    about = {
        "kind": "eval",
        "stage": "image",
        "step": 1,
        "direction": "image",
        "prompt_key": "p",
        "reward": 1.0,
    }
    with store.writer(message="pictures") as writer:
        for key, blob in (("none", None), ("damaged", b"\xff\xd8"), ("whole", picture())):
            writer.add(key, blob=blob, target="", response="", **about)
    scores = rescore(tmp_path, Brightness())
    rows = scores.where("isnan(reward/again)").to_arrow(["key"])
    assert rows["key"].to_pylist() == ["damaged", "none"]
    assert scores.where("key = 'whole'").to_arrow(["reward/again"])["reward/again"].to_pylist() == [9.0]


def test_a_name_that_is_taken_is_refused(scores: Scores) -> None:
    with pytest.raises(ConfigError, match="'reward/vlm' already"):
        rescore(scores, Brightness(), name="vlm")
