"""Staging folders in the folder of a store, and scratch folders beside them for stores on a network."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from storage.backends.base import Workspace
from storage.backends.folder_locks import hold_abandoned, lock_folder

__all__ = ["Workspaces"]


class Workspaces:
    """The folders staging/<writer>/ of a store in `root`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "staging"
        self._scratches: dict[Path, Path] = {}

    def open(self, writer: str, *, has_scratch: bool) -> Workspace | None:
        """The folder of a writer, locked; None while another writer has it.

        Args:
            writer: Name of the folder.
            has_scratch: Files are made in a temporary folder of this machine; the one in the store only holds
                the lock and what is on its way to its name.
        """
        folder = self._folder / writer
        lock = lock_folder(folder)
        if lock is None:
            return None
        scratch = Path(tempfile.mkdtemp(prefix=f"store-{writer}-")) if has_scratch else None
        if scratch is not None:
            self._scratches[scratch] = folder

        def leave() -> None:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
                del self._scratches[scratch]
            os.close(lock)

        def close() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            leave()

        return Workspace(path=scratch or folder, close=close, leave=leave)

    def bring(self, source: Path) -> Path:
        """A finished file in the store's own file system, copied there if it was made in a scratch folder."""
        for scratch, folder in self._scratches.items():
            if source.is_relative_to(scratch):
                copy = folder / f"{secrets.token_hex(8)}{source.suffix}"
                shutil.copyfile(source, copy)
                source.unlink()
                return copy
        return source

    @contextmanager
    def watch(self) -> Iterator[set[str]]:
        """The writers at work; nobody comes back to a folder that he left before the block ends."""
        with ExitStack() as held:
            folders = [path for path in self._folder.glob("*") if path.is_dir()]
            yield {path.name for path in folders if not hold_abandoned(path, held)}
