"""What a place that can only be read answers to everything else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from storage.backends.base import Backend, StoredFile, Workspace

__all__ = ["ReadOnlyBackend"]


class ReadOnlyBackend(Backend):
    """A backend whose writing methods all raise what `refuse` raises."""

    read_only = True

    @abstractmethod
    def refuse(self) -> NoReturn:
        """Raise a StorageError that says what to do instead."""

    def prepare(self, folders: Iterable[str]) -> None:
        self.refuse()

    def create(self, name: str, content: bytes) -> bool:
        self.refuse()

    def remove(self, name: str) -> None:
        self.refuse()

    def remove_unless_held(self, name: str, is_kept: Callable[[], bool]) -> bool:
        self.refuse()

    def open_workspace(self, writer: str) -> Workspace:
        self.refuse()

    def reopen_workspace(self, writer: str) -> Workspace | None:
        self.refuse()

    def install(self, source: Path, name: str) -> None:
        self.refuse()

    def flush(self, names: Iterable[str]) -> None:
        self.refuse()

    def exclude_collection(self) -> AbstractContextManager[None]:
        self.refuse()

    def walk(self, folder: str) -> Iterator[StoredFile]:
        self.refuse()

    def watch_writers(self) -> AbstractContextManager[set[str]]:
        self.refuse()

    def commit_folders(self, before: float) -> list[str]:
        self.refuse()

    def remove_empty_folder(self, name: str) -> None:
        self.refuse()
