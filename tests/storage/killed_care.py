"""Care of a store in a process of its own, to be killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from storage import FeatureStore, SealedPart, repair_store

_STEPS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"}


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
    FeatureStore.open(path).export(None, path / "exported", "parquet")


ACTIONS = {
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
