from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from unirl.errors import ConfigError
from unirl.rewards import LabelledPictures, RewardReport, VlmConfig, VlmYesNo, caption_pairs, train_yes_no
from unirl.rewards.train import expected_calibration_error
from unirl.types import Sample

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
CAPTIONS = [f"a {name} picture" for name in COLOURS]
TINY = VlmConfig(
    width=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    mlp_width=64,
    vision_width=32,
    vision_layers=1,
    vision_mlp_width=32,
)


def coloured(num: int, seed: int) -> tuple[np.ndarray, list[str]]:
    generator = np.random.default_rng(seed)
    kinds = generator.integers(len(CAPTIONS), size=num)
    values = np.array(list(COLOURS.values()))[kinds][:, None, None]
    noise = generator.integers(-60, 60, (num, 16, 16, 3))
    return np.clip(values + noise, 0, 255).astype(np.uint8), [CAPTIONS[kind] for kind in kinds]


def held_out() -> LabelledPictures:
    return caption_pairs(*coloured(50, 1), captions_per_picture=2)(100, np.random.default_rng(1))


def train(out_dir: Path, *, steps: int, seed: int = 0) -> RewardReport:
    return train_yes_no(
        caption_pairs(*coloured(64, 0), captions_per_picture=2),
        captions=CAPTIONS,
        image_size=(16, 16),
        out_dir=out_dir,
        held_out=held_out(),
        steps=steps,
        batch_size=16,
        learning_rate=5e-3,
        seed=seed,
        config=TINY,
        progress=False,
    )


def test_the_colour_of_a_picture_is_learnt(tmp_path: Path) -> None:
    report = train(tmp_path, steps=120)
    assert report.accuracy > 0.9
    assert report.mass > 0.95
    assert report.calibration_error < 0.2
    assert report.num_held_out == 100
    stored = json.loads((tmp_path / "reward.json").read_text())["training"]
    assert stored["accuracy"] == report.accuracy
    pictures, captions = coloured(2, 5)
    wrong = next(caption for caption in CAPTIONS if caption not in captions)
    right, other = (
        VlmYesNo.load(tmp_path)
        .score(
            [
                Sample(key="k", direction="image", caption=caption, image=pictures[0], target="")
                for caption in (captions[0], wrong)
            ]
        )
        .total
    )
    assert right > 0.5 > other


def test_a_seed_gives_one_model_and_the_global_generators_are_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    first = train(tmp_path / "a", steps=4)
    torch.manual_seed(123)
    assert train(tmp_path / "b", steps=4).loss == first.loss
    assert train(tmp_path / "c", steps=4, seed=1).loss != first.loss
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    torch.random.set_rng_state(before)


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps is 0"):
        train(tmp_path, steps=0)


def test_calibration_error_worked_by_hand() -> None:
    """Bin 0.9..1: two at 0.95, one of them true: gap 0.45. Bin 0.2..0.3: two at 0.25, none true: gap 0.25."""
    probabilities = np.array([0.95, 0.95, 0.25, 0.25])
    labels = np.array([True, False, False, False])
    assert expected_calibration_error(probabilities, labels, np.ones(4)) == pytest.approx(0.35)
    weights = np.array([1.0, 1.0, 0.0, 0.0])
    assert expected_calibration_error(probabilities, labels, weights) == pytest.approx(0.45)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([True, False]), np.ones(2)) == 0
