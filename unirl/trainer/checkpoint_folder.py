"""What stays in a folder of checkpoints: the newest, the best, and what a kill must not take away."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unirl.trainer.checkpoint import FROZEN, checkpoints_in, read_records, step_of

__all__ = ["drop_unnamed", "put_in_place", "remove_leftovers", "rotate"]

REPLACED = ".replaced"
"""Ending of the name of a checkpoint while another of its step takes its place."""


def put_in_place(staging: Path, final: Path) -> None:
    """Give a whole checkpoint its name. One of that step which is there already goes only when it has it."""
    replaced = final.with_name(f".{final.name}{REPLACED}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staging.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def rotate(directory: Path, *, newest: Path, keep: int) -> None:
    """Drop checkpoints before the newest `keep`, but never the best, see `_best`.

    Those of later steps go as well: they are damaged ones that a resume passed over, and the run went back
    behind them.
    """
    whole = checkpoints_in(directory)
    position = whole.index(newest) + 1
    abandoned = whole[: max(position - keep, 0)] + whole[position:]
    best = _best({p: r for p, r in read_records(directory).items() if p in whole[:position]})
    for path in abandoned:
        if path != best:
            shutil.rmtree(path)


def drop_unnamed(directory: Path, *, also_named: Collection[str]) -> None:
    """Drop frozen tensors that belong to no checkpoint any more, as those of another number of ranks.

    Only while every rank's frozen files are written and none can begin the next.

    Args:
        directory: Of checkpoints.
        also_named: Names of the files of the checkpoint that is about to be in place.
    """
    named = {name for record in read_records(directory).values() for name in record.get(FROZEN, {})}
    for path in (directory / FROZEN).glob("*.safetensors"):
        if path.name not in named and path.name not in also_named:
            path.unlink()


def remove_leftovers(directory: Path) -> None:
    """Drop what a kill left half written. Only while no rank is saving."""
    for path in directory.glob(f".step-*{REPLACED}"):
        final = directory / path.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)
    for path in directory.glob(".step-*.partial"):
        shutil.rmtree(path)
    for path in directory.glob(".step-*.abandoned"):
        path.unlink()
    for path in (directory / FROZEN).glob(".*.partial"):
        path.unlink()


def _best(records: Mapping[Path, Mapping[str, Any]]) -> Path | None:
    """Of the evaluated ones, the one with the highest judge; the newest of equals.

    Where the judge could tell nothing of any of them, the one with the highest reward.
    """
    for measure in ("judge", "reward"):
        known = [
            (record[measure], step_of(path), path)
            for path, record in records.items()
            if record.get(measure) is not None
        ]
        if known:
            return max(known)[2]
    return None
