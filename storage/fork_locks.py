"""Locks that are free in a forked child, although another thread of the parent held them at that moment."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["new_lock"]

_owners: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


def new_lock(owner: object, name: str) -> threading.Lock:
    """A lock to be kept as the attribute `name` of `owner`, an object or a module.

    What it guards must be usable between any two of its changes: a fork does not wait for other threads.
    """
    _owners.setdefault(owner, set()).add(name)
    return threading.Lock()


def _after_fork_in_child() -> None:
    for owner, names in list(_owners.items()):
        for name in names:
            setattr(owner, name, threading.Lock())


os.register_at_fork(after_in_child=_after_fork_in_child)
