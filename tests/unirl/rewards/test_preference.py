"""Pairs on disk, the training on them, and the reward that comes out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import FeatureStore
from tests.contracts.reward_contract import PictureRewardContract
from unirl.errors import ConfigError
from unirl.rewards import (
    Preference,
    PreferencePair,
    VlmConfig,
    VlmYesNo,
    label_pairs,
    load_reward,
    read_pairs,
    train_preference,
    write_pairs,
)
from unirl.rewards.picture_statistics import PictureStatistic
from unirl.rewards.train_preference import reward_version, split_pairs
from unirl.types import Reward, Sample

TINY = VlmConfig(
    width=32, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=32, vision_width=32, vision_layers=1
)


def sample(prompt: str, level: int, seed: int = 0) -> Sample:
    noise = np.random.default_rng(seed).integers(-20, 20, (16, 16, 3))
    image = np.clip(level + noise, 0, 255).astype(np.uint8)
    return Sample(key=prompt, direction="image", caption="a picture", image=image, target="a picture")


def make_pairs(num: int, *, labelled: bool = True) -> list[PreferencePair]:
    """The lighter of two pictures is preferred; which stands first is random."""
    generator = np.random.default_rng(1)
    pairs = []
    for number in range(num):
        levels = generator.choice([30, 90, 150, 220], size=2, replace=False)
        sides = [sample(f"prompt {number % 40}", int(level), number) for level in levels]
        label = "first" if levels[0] > levels[1] else "second"
        pairs.append(
            PreferencePair(
                pair=f"pair {number}",
                first=sides[0],
                second=sides[1],
                label=label if labelled else None,  # type: ignore[arg-type]
            )
        )
    return pairs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preference")
    train_preference(
        make_pairs(120),
        directory,
        image_size=(16, 16),
        steps=60,
        batch_size=16,
        learning_rate=3e-3,
        config=TINY,
        progress=False,
    )
    return directory


class TestPreference(PictureRewardContract):
    @pytest.fixture
    def reward(self, trained: Path) -> Reward:
        return Preference.load(trained, batch_size=4)


def test_the_preference_is_learnt_and_reported(trained: Path) -> None:
    training = json.loads((trained / "reward.json").read_text())["training"]
    assert training["version"] == reward_version(trained) == 1
    assert training["num_held_out"] == 24
    assert training["accuracy"] > 0.9
    assert 0 <= training["calibration_error"] < 0.3
    reward = load_reward(trained)
    assert isinstance(reward, Preference)
    scores = reward.score([sample("new", level, 99) for level in (30, 90, 150, 220)]).total
    assert scores.tolist() == sorted(scores)


def test_the_next_version_starts_from_the_one_before(trained: Path, tmp_path: Path) -> None:
    options = {"steps": 1, "batch_size": 4, "progress": False}
    report = train_preference(make_pairs(60), tmp_path, start=trained, learning_rate=0.0, **options)  # type: ignore[arg-type]
    assert report.version == reward_version(tmp_path) == 2
    given = [sample("new", 90)]
    np.testing.assert_allclose(
        Preference.load(tmp_path).score(given).total, Preference.load(trained).score(given).total, atol=1e-5
    )
    assert Preference.load(tmp_path).identity == Preference.load(trained).identity


def test_a_yes_no_reward_can_be_the_start(tiny_vlm: Path, tmp_path: Path) -> None:
    report = train_preference(make_pairs(60), tmp_path, start=tiny_vlm, steps=1, batch_size=4, progress=False)
    assert (report.version, report.steps) == (2, 1)
    assert isinstance(load_reward(tiny_vlm), VlmYesNo)
    with pytest.raises(ConfigError, match="no preference reward"):
        Preference.load(tiny_vlm)


def test_pairs_of_a_prompt_stay_together() -> None:
    trained, held_out = split_pairs(make_pairs(120), held_out_fraction=0.25, seed=3)
    assert (len(trained), len(held_out)) == (90, 30)
    assert not {pair.prompt for pair in trained} & {pair.prompt for pair in held_out}
    with pytest.raises(ConfigError, match="5 pairs, 0 of them labelled, of 0 prompts"):
        split_pairs(make_pairs(5, labelled=False), held_out_fraction=0.2, seed=0)


def test_pairs_survive_the_disk_and_labels_come_back(tmp_path: Path) -> None:
    pairs = make_pairs(3, labelled=False)
    path = write_pairs(pairs, tmp_path / "pairs")
    found = read_pairs(tmp_path / "pairs")
    assert [pair.pair for pair in found] == ["pair 0", "pair 1", "pair 2"]
    np.testing.assert_array_equal(found[1].second.image, pairs[1].second.image)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["label"] = "tie"
    path.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "labels.jsonl").write_text('{"pair": "pair 2", "label": "second"}\n')
    labels = [pair.label for pair in read_pairs(path, labels=tmp_path / "labels.jsonl")]
    assert labels == ["tie", None, "second"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": "both"}, r"pairs\.jsonl:1: label is 'both'"),
        ({"first": {"image": "pictures/none.png", "caption": ""}}, "pair pair 0: no picture"),
        ({"target": None, "second": {}}, "'caption' is missing"),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = write_pairs(make_pairs(1), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        read_pairs(path)


def test_labels_of_unknown_pairs_are_refused(tmp_path: Path) -> None:
    write_pairs(make_pairs(1), tmp_path)
    (tmp_path / "labels.jsonl").write_text('{"pair": "other", "label": "first"}\nno json\n')
    with pytest.raises(ConfigError, match=r"labels\.jsonl:2: no JSON"):
        read_pairs(tmp_path, labels=tmp_path / "labels.jsonl")
    (tmp_path / "labels.jsonl").write_text('{"pair": "other", "label": "first"}\n')
    with pytest.raises(ConfigError, match="1 pairs that are not in"):
        read_pairs(tmp_path, labels=tmp_path / "labels.jsonl")


def test_a_stronger_reward_labels() -> None:
    pairs = make_pairs(20)
    given = [PreferencePair(pair=pair.pair, first=pair.first, second=pair.second) for pair in pairs]
    labelled = label_pairs(given, PictureStatistic("brightness"))
    assert [pair.label for pair in labelled] == [pair.label for pair in pairs]
    assert {pair.label for pair in label_pairs(given, PictureStatistic("brightness"), margin=1.0)} == {"tie"}


def test_pairs_of_a_store(tmp_path: Path) -> None:
    with FeatureStore.create(tmp_path).writer(message="pairs") as writer:
        for number, pair in enumerate(("a", "a", "b", "b")):
            buffer = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer, "PNG")
            writer.add(f"{number}", buffer.getvalue(), pair=pair, preferred=number in (1, 2), caption="red")
        writer.add("4", buffer.getvalue(), pair=None, preferred=None, caption="other")
    found = read_pairs(tmp_path)
    assert [(pair.pair, pair.label) for pair in found] == [("a", "first"), ("b", "first")]
    assert [int(pair.first.image[0, 0, 0]) for pair in found] == [1, 2]
    with pytest.raises(ConfigError, match="pair a needs one row with `preferred`"):
        read_pairs(tmp_path, where="key <> '0'")
