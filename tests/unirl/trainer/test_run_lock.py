"""Two processes never work on one run."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unirl.errors import ConfigError
from unirl.trainer.run_lock import lock_run

HOLD = """
import os, sys, time
from pathlib import Path
from unirl.trainer.run_lock import lock_run
with lock_run(Path(sys.argv[1])):
    if os.fork() == 0:  # as a worker that outlives its parent
        time.sleep(20)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works on tmp_path / "run" until it gets a line."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_is_refused_and_told_who_holds_it(
    tmp_path: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = rf"run: process {holder.pid} on {socket.gethostname()} works on this run.*another directory"
    with pytest.raises(ConfigError, match=wanted), lock_run(tmp_path / "run", wait_s=0.1):
        pytest.fail("two processes hold it")
    assert f"waiting up to 0 s for process {holder.pid}" in caplog.text


def test_a_killed_process_holds_nothing_and_neither_does_its_worker(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with lock_run(tmp_path / "run", wait_s=0.0):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()


def test_a_start_waits_for_a_run_that_is_ending(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.write("end\n")
    holder.stdin.flush()
    with lock_run(tmp_path / "run"):
        assert holder.wait(timeout=10) == 0


def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with caplog.at_level(logging.WARNING), lock_run(tmp_path / "run"):
        pass
    assert "cannot be locked" in caplog.text and "No locks available" in caplog.text
