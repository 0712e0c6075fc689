"""An alarm that stops a run, in the loop itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unirl.errors import AlarmError
from unirl.trainer.alarms import AlarmSettings


def test_an_alarm_stops_the_run_and_the_next_start_goes_on_to_its_end(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    """The divergence is always above -1, so the first step of each stage raises an alarm; it is said once."""
    store = toy.make_store(tmp_path / "store")

    def train(run: str, *, stop: bool) -> None:
        alarms = AlarmSettings(stop=stop, kl=-1.0, steps=1)
        settings = replace(toy.SETTINGS, alarms=alarms, checkpoint_every=100)
        toy.make_trainer(tmp_path / run, store, settings=settings).train()

    for step in (1, 4):
        with pytest.raises(AlarmError, match=f"stopped after step {step} by an alarm, state saved: diverg"):
            train("stopped", stop=True)
        assert (tmp_path / "stopped" / "checkpoints" / f"step-{step:08d}").is_dir()
    train("stopped", stop=True)
    train("whole", stop=False)
    lines = toy.metrics_of(tmp_path / "stopped")
    assert lines == toy.metrics_of(tmp_path / "whole")
    assert [line["step"] for line in lines if line["kind"] == "alarm"] == [1, 4]
    ours, whole = (toy.weights_of(tmp_path / run) for run in ("stopped", "whole"))
    assert all(value.equal(whole[name]) for name, value in ours.items())
