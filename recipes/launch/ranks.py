"""Start the ranks of one machine, pass requests to stop on to them, and end with their exit code.

    python -m recipes.launch.ranks 8 unirl train RECIPE --run RUN

`accelerate launch` and `torchrun` end with 1 whatever their ranks end with. A scheduler that must see 75
(stopped on request, state saved, start me again) and does not start each rank itself needs this instead.

With several machines, set on each NUM_NODES, NODE_RANK (from 0), MASTER_ADDR (address of machine 0) and
MASTER_PORT (a free port there).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

__all__ = ["REQUEUE_EXIT_CODE", "main", "rank_variables", "run_ranks"]

REQUEUE_EXIT_CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
USAGE = "usage: python -m recipes.launch.ranks RANKS_ON_THIS_MACHINE COMMAND [ARGUMENT...]\n"


def rank_variables(ranks: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """What torch.distributed reads from the environment of each rank of this machine."""
    nodes, node = int(environ.get("NUM_NODES", "1")), int(environ.get("NODE_RANK", "0"))
    shared = {
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environ.get("MASTER_PORT", "29500"),
    }
    return [{"RANK": str(node * ranks + i), "LOCAL_RANK": str(i), **shared} for i in range(ranks)]


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run a command once a rank and wait for all of them.

    A rank that fails leaves the others waiting for it, so they are asked to stop.

    Returns:
        The exit code of the first rank that failed; 75 if none failed and one was stopped; else 0. A rank
        that a signal ended counts as 128 and the signal's number, or as stopped if that signal was passed on.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    passed_on: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        for rank in running.values():
            rank.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
    # A terminal sends Ctrl-C to the ranks itself.
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        for variables in rank_variables(ranks, os.environ):
            rank = subprocess.Popen(command, env={**os.environ, **variables})
            running[rank.pid] = rank
        failed = stopped = 0
        while running:
            pid, status = os.wait()
            running.pop(pid).returncode = code = os.waitstatus_to_exitcode(status)
            if code == REQUEUE_EXIT_CODE or -code in passed_on:
                stopped = REQUEUE_EXIT_CODE
            elif code and not failed:
                failed = code if code > 0 else 128 - code
                for rank in running.values():
                    rank.terminate()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return failed or stopped


def main(arguments: Sequence[str]) -> int:
    """Read `RANKS COMMAND...` and run it."""
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        sys.stderr.write(USAGE)
        return 2
    return run_ranks(arguments[1:], int(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
