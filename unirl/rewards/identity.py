"""What a reward is, as a short string: the key under which its scores may be kept."""

from __future__ import annotations

import json

import xxhash

__all__ = ["identity_of"]


def identity_of(name: str, settings: object) -> str:
    """Return "<name>/<hash of the settings>"; settings are plain values, lists and mappings of them."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return f"{name}/{xxhash.xxh3_128_hexdigest(text.encode())}"
