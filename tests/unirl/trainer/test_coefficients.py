from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl.algorithms import AdaptiveKL
from unirl.trainer.coefficients import Coefficients
from unirl.trainer.stages import ModalitySettings, Stage

BOTH = Stage(
    name="s",
    direction="both",
    prompts="true",
    steps=1,
    kl_coef=0.1,
    kl_target=0.05,
    kl_horizon=1000,
    entropy_coef=0.01,
    image=ModalitySettings(kl_coef=0.4, kl_target=0.2, entropy_target=4.0),
)


def seen(**means: tuple[float, float]) -> dict[str, Tensor]:
    """Divergence and entropy of each modality, over ten tokens."""
    found = {}
    for direction, (kl, entropy) in means.items():
        for name, value in (("kl", kl), ("entropy", entropy)):
            found[f"{name}/{direction}_sum"] = torch.tensor(10.0 * value)
            found[f"{name}/{direction}_tokens"] = torch.tensor(10.0)
    return found


def test_each_modality_follows_its_own_target() -> None:
    """64 of 128 samples each. Text has too much divergence, pictures too little, and too little entropy."""
    weights = Coefficients(BOTH)
    first = weights.before_rollout()
    assert (first.of("text").kl_coef, first.of("image").kl_coef) == (0.1, 0.4)
    now = weights.before_update(seen(text=(0.06, 1.0), image=(0.1, 3.0)))
    assert (now.of("text").entropy_coef, now.of("image").entropy_coef) == (0.01, 0.01)
    assert weights.metrics(now) == {"kl/coef_text": 0.1, "kl/coef_image": 0.4, "entropy/coef_image": 0.01}
    weights.adapt(seen(text=(0.06, 1.0), image=(0.1, 3.0)))
    then = weights.before_update(seen(text=(0.06, 1.0), image=(0.1, 4.5)))
    assert then.of("text").kl_coef == pytest.approx(0.1 * (1 + 0.2 * 0.064))
    assert then.of("image").kl_coef == pytest.approx(0.4 * (1 - 0.2 * 0.064))
    assert (then.of("text").entropy_coef, then.of("image").entropy_coef) == (0.01, 0.0)
    assert weights.before_update(seen(text=(0, 1.0), image=(0, 3.9))).of("image").entropy_coef == 0.015


def test_a_stage_of_one_direction_is_its_kl_controller() -> None:
    stage = Stage(name="s", direction="text", prompts="true", steps=1)
    weights, controller = Coefficients(stage), AdaptiveKL(value=0.02, target=0.05, horizon=10_000)
    for kl in (0.3, 0.01, 0.05):
        weights.adapt(seen(text=(kl, 1.0)))
        controller = controller.update(kl, stage.samples_per_step)
    assert weights.before_rollout().of("text").kl_coef == controller.value
    assert weights.metrics(weights.before_rollout()) == {"kl/coef": controller.value}


def test_a_modality_without_a_sample_that_counts_keeps_its_weights() -> None:
    weights = Coefficients(BOTH)
    weights.adapt(seen(text=(0.06, 1.0)))
    assert weights.before_rollout().of("image").kl_coef == 0.4


def test_state_goes_over() -> None:
    weights, other = Coefficients(BOTH), Coefficients(BOTH)
    weights.adapt(seen(text=(0.06, 1.0), image=(0.1, 3.0)))
    other.load_state_dict(weights.state_dict())
    assert other.before_rollout() == weights.before_rollout()
    assert other.state_dict() == weights.state_dict()
