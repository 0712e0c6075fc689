"""Programs that the kill tests run in processes of their own, to be killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from storage import FeatureStore, SealedPart, repair_store

_STEPS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"}


def append(path: Path, start: int, count: int) -> None:
    with FeatureStore.open(path).writer(message=f"append {start}") as writer:
        for i in range(start, start + count):
            writer.add(f"k{i}", b"blob %d" % i * 50, {"x": np.full(4, i, np.int32)}, number=i)
        writer.quarantine(key=f"q{start}", place="nowhere", reason="test")


def add_column(path: Path, name: str) -> None:
    def compute(view):
        return view.rows.astype(np.int64)

    FeatureStore.open(path).add_column(name, compute, dtype="int64", shape=())


def seal_and_publish(path: Path) -> None:
    records = []
    for start in (1000, 1010):
        with FeatureStore.open(path).part_writer() as writer:
            for i in range(start, start + 10):
                writer.add(f"k{i}", b"blob", width=i)
        records.append(writer.sealed.to_json())
    FeatureStore.open(path).publish_parts(map(SealedPart.from_json, records))


def import_folder(path: Path) -> None:
    FeatureStore.open(path).import_rows(path.with_name("out"), part_bytes=1)


def export_folder(path: Path) -> None:
    FeatureStore.open(path).export(None, exported_from(path), "parquet")


def exported_from(path: Path) -> Path:
    """Beside the store, and with the store's path in its own."""
    return path.with_name(f"{path.name}-exported")


ACTIONS = {
    "append": lambda path: append(path, 1000, 20),
    "column": lambda path: add_column(path, "late"),
    "seal": seal_and_publish,
    "import": import_folder,
    "export": export_folder,
    "repair": repair_store,
    "compact": lambda path: FeatureStore.open(path).compact(),
}


def killed_at_step(action: str, path: Path, step: int) -> None:
    """Run an action and die at its step-th touch of the file system; exit code 0 when it has fewer steps."""
    left = step

    def hook(event: str, args: tuple) -> None:
        nonlocal left
        if event in _STEPS and str(path) in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    ACTIONS[action](path)


def append_for_ever(path: Path, name: int) -> None:
    for commit in range(1_000_000):
        append(path, 1_000_000 * name + 10 * commit, 10)
        if commit % 3 == 2:
            add_column(path, f"c-{name}-{commit}")


def append_some(path: Path, name: int, commits: int) -> None:
    for commit in range(commits):
        append(path, 1_000_000 * name + 10 * commit, 10)
