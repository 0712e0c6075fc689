"""The alarms of a run: those that it raised, or those that other limits would have raised."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from unirl.explore.run import Run, number
from unirl.trainer.alarms import AlarmSettings, AlarmWatch

__all__ = ["run_alarms"]

_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "stage": pa.string(),
        "direction": pa.string(),
        "alarm": pa.string(),
        "message": pa.string(),
        "evidence": pa.map_(pa.string(), pa.float64()),
    }
)
_PLACE = ("kind", "stage", "direction", "step")


def run_alarms(run: Run, settings: AlarmSettings | None = None) -> pa.Table:
    """Return the alarms of a run, first step first.

    Args:
        run: The run.
        settings: None gives what the run raised. Limits give what they find in its metrics, so that one can
            try which limits would have caught something.

    Returns:
        One row per alarm: `step`, `stage`, `direction`, `alarm` (its name), `message`, and the `evidence`:
        numbers by their names.
    """
    found = _raised(run) if settings is None else _watched(run, settings)
    return pa.Table.from_pylist(found, schema=_SCHEMA).sort_by("step")


def _raised(run: Run) -> list[dict[str, Any]]:
    return [
        {
            "step": line.get("step"),
            **{name: str(line.get(name, "")) for name in ("stage", "direction", "alarm", "message")},
            "evidence": [(name, number(line, name)) for name in line if name.startswith("alarm/")],
        }
        for line in run.alarms
    ]


def _watched(run: Run, settings: AlarmSettings) -> list[dict[str, Any]]:
    watch = AlarmWatch(settings)
    for line in (*run.evals, *run.train):
        if all(name in line for name in _PLACE):
            watch.see(line)
    return [
        {
            "step": alarm.step,
            "stage": alarm.stage,
            "direction": alarm.direction,
            "alarm": alarm.name,
            "message": alarm.message,
            "evidence": list(alarm.evidence.items()),
        }
        for alarm in watch.raised
    ]
