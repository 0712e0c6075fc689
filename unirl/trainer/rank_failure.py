"""When one rank fails, all of them end soon, and each says which one failed first and why."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from types import TracebackType

from accelerate import Accelerator
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in the stubs
from torch.distributed.distributed_c10d import PrefixStore, Store

from unirl.errors import RankFailedError
from unirl.trainer.preemption import StopAsked

__all__ = ["GRACE_S", "FailureWatch"]

log = logging.getLogger("unirl.trainer.rank_failure")

GRACE_S = 10.0
"""From the news of another rank's failure to the end of this process, if it does not end by itself."""
POLL_S = 0.5
FIRST = "first"

blocks = itertools.count()
"""Ranks enter their blocks in the same order, so equal numbers are the same block."""


class FailureWatch:
    """A block that all ranks run together. The first that leaves it by an exception tells the others.

    A rank that waits for one that is gone mostly sees a closed connection, and says so much louder than the
    cause; or it sees nothing for half an hour. Within the block a thread asks the store of the process group
    twice a second for the first failure. A rank that is still in the block `GRACE_S` later is ended.

    On one rank, or where the process group has no address in the environment, nothing is watched.
    """

    def __init__(self, accelerator: Accelerator, *, grace_s: float = GRACE_S) -> None:
        self._rank, self._grace_s = accelerator.process_index, grace_s
        self._is_on = accelerator.num_processes > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        self._place = ""
        self._ended = threading.Event()

    def at(self, place: str) -> None:
        """Note what this rank is doing, for the message: the step, the samples."""
        self._place = place

    def __enter__(self) -> FailureWatch:
        if self._is_on:
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"unirl/failure/{restart}/{next(blocks)}"
            # The thread's calls would wait for those of this one if they shared a connection.
            self._store, watched = _connect(prefix), _connect(prefix)
            self._thread = threading.Thread(target=self._watch, args=(watched,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the rank's own exception go on, or name the one that came first.

        Raises:
            RankFailedError: If another rank failed before with another error.
        """
        self._ended.set()
        if not self._is_on:
            return
        self._thread.join()
        if not isinstance(error, Exception) or isinstance(error, StopAsked | RankFailedError):
            return
        cause = f"{type(error).__name__}: {error}"
        place = f", {self._place}" if self._place else ""
        mine = f"rank {self._rank} failed first{place}: {cause}"
        first = self._store.compare_set(FIRST, "", mine).decode()
        if first == mine:
            log.error("%s", mine)
        elif not first.endswith(cause):
            raise RankFailedError(f"{first}; rank {self._rank} ended because of it") from error

    def _watch(self, store: Store) -> None:
        while not self._ended.wait(POLL_S):
            if store.check([FIRST]):
                first = store.get(FIRST).decode()
                if not self._ended.wait(self._grace_s):
                    log.error("%s; rank %d was still waiting and is ended", first, self._rank)
                    sys.stderr.flush()
                    os._exit(1)
                return


def _connect(prefix: str) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore(prefix, TCPStore(address, port, is_master=False, wait_for_workers=False))
