"""Places where a store can lie."""

from __future__ import annotations

from pathlib import Path

from storage.backends.base import Backend
from storage.backends.local import LocalBackend
from storage.backends.memory import MemoryBackend

__all__ = ["Backend", "LocalBackend", "MemoryBackend", "find_backend"]


def find_backend(place: str | Path | Backend) -> Backend:
    """The backend of a folder; a backend is given back as it is."""
    return place if isinstance(place, Backend) else LocalBackend(place)
