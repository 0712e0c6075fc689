"""Places where a store can lie."""

from __future__ import annotations

from pathlib import Path

from storage.backends.base import Backend
from storage.backends.local import LocalBackend
from storage.backends.memory import MemoryBackend

__all__ = ["Backend", "LocalBackend", "MemoryBackend", "find_backend"]


def find_backend(place: str | Path | Backend, *, allow_network_fs: bool | None = None) -> Backend:
    """The backend of a folder; a backend is given back as it is."""
    if isinstance(place, Backend):
        return place
    return LocalBackend(place, allow_network_fs=allow_network_fs)
