from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from unirl.errors import RolloutError
from unirl.rollout.engine import (
    RolloutRequest,
    require_same_sampling,
    sample_seed,
    sample_uniforms,
)
from unirl.rollout.native import NativeEngine
from unirl.types import Rollout, SamplingSettings


def test_group_members_differ_and_keep_their_own_stream() -> None:
    four, two = sample_uniforms((3, 1, 5), 4, 6), sample_uniforms((3, 1, 5), 2, 6)
    assert four.shape == (4, 6) and four.dtype == np.float64
    assert (four[:2] == two).all()
    assert len(np.unique(four)) == 24
    assert (four >= 0).all() and (four < 1).all()


def test_streams_of_other_seeds_steps_and_prompts_differ() -> None:
    seeds = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 1, 3)]
    assert len(np.unique([sample_uniforms(seed, 1, 4) for seed in seeds])) == 20
    assert len({sample_seed(seed, g) for seed in seeds for g in range(4)}) == 20
    assert 0 <= sample_seed((0, 1, 2), 3) < 2**63


def test_a_longer_response_begins_alike() -> None:
    assert (sample_uniforms((1, 2), 2, 9)[:, :4] == sample_uniforms((1, 2), 2, 4)).all()


@pytest.fixture(scope="module")
def rollout(toy: SimpleNamespace) -> Rollout:
    policy = toy.make_policy(seed=4)
    return NativeEngine(policy).rollout(
        RolloutRequest(
            prompts=toy.make_prompts("image", 2),
            group_size=2,
            max_new_tokens=4,
            seeds=[(1, 0), (1, 1)],
            sampling=SamplingSettings(temperature=0.7),
        )
    )


def test_a_replay_under_other_settings_is_refused_with_both_values(rollout: Rollout) -> None:
    require_same_sampling(rollout, SamplingSettings(temperature=0.7))
    with pytest.raises(RolloutError, match=r"p0, row 0, token 0: drawn at temperature 0\.7, replayed at 1;"):
        require_same_sampling(rollout, SamplingSettings())
    with pytest.raises(RolloutError, match=r"drawn at guidance 1, replayed at 3"):
        require_same_sampling(rollout, SamplingSettings(temperature=0.7, guidance=3.0))


def test_a_single_token_under_other_settings_is_found(rollout: Rollout) -> None:
    modality = rollout.origin.modality.clone()
    modality[3, 2] = 0
    mixed = replace(rollout, origin=replace(rollout.origin, modality=modality))
    with pytest.raises(RolloutError, match=r"p1, row 3, token 2: drawn at modality text, replayed at image"):
        require_same_sampling(mixed, SamplingSettings(temperature=0.7))
