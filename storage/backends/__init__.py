"""Places where a store can lie."""

from __future__ import annotations

import re
from pathlib import Path

from storage.backends.base import Backend
from storage.backends.local import LocalBackend
from storage.backends.memory import MemoryBackend
from storage.backends.remote import RemoteBackend
from storage.backends.shard_cache import ShardCache

__all__ = ["Backend", "LocalBackend", "MemoryBackend", "RemoteBackend", "ShardCache", "find_backend"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")


def find_backend(place: str | Path | Backend, *, allow_network_fs: bool | None = None) -> Backend:
    """The backend of a folder or a URL; a backend is given back as it is."""
    if isinstance(place, Backend):
        return place
    if isinstance(place, str) and _URL.match(place):
        return RemoteBackend(place)
    return LocalBackend(place, allow_network_fs=allow_network_fs)
