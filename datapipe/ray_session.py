"""The Ray that an ingest runs on: one that is there, or one of its own for a while."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from datapipe.errors import MissingExtraError

__all__ = ["ray_session"]


@contextmanager
def ray_session(workers: int) -> Iterator[Any]:
    """Ray as it runs already, else on the cluster of RAY_ADDRESS, else on this machine for this block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError(
            "engine='ray' needs Ray, which is not installed; install the extra with "
            "`pip install 'unirl[ray]'`"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    here: Mapping[str, Any] = {
        "num_cpus": workers,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        logging_level=logging.ERROR, log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else here)
    )
    _restore(before)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()
        _restore(before)


def _restore(handler: Any) -> None:
    """Set the handler again that Ray replaces by one that ends the process; the caller's commits first."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
