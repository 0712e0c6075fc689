from __future__ import annotations

import time

import pytest

from unirl.trainer.step_metrics import measure


def test_seconds_of_a_phase_add_up_and_its_memory_is_the_most() -> None:
    phases: dict[str, float] = {"memory/rollout_bytes": 1e15}
    for _ in range(2):
        with measure(phases, "rollout"):
            time.sleep(0.01)
    with measure(phases, "reward"):
        pass
    assert phases["time/rollout_s"] >= 0.02
    assert phases["memory/rollout_bytes"] == 1e15
    assert 1e6 < phases["memory/reward_bytes"] < 1e15
    assert len(phases) == 4


def test_a_phase_that_fails_is_not_counted() -> None:
    phases: dict[str, float] = {}
    with pytest.raises(RuntimeError, match="broken"), measure(phases, "rollout"):
        raise RuntimeError("broken")
    assert phases == {}
