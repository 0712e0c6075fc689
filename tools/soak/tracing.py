"""Running a function in a child process and killing it at a chosen system call, or at a chosen moment.

The child is traced with ptrace, so the instants lie on every call that changes a file, also on those made
by LMDB and Arrow. Where tracing is not allowed, a kill falls on a moment of the clock instead.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Outcome", "can_trace", "fork", "kill_after", "kill_at_step"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_TRACESYSGOOD, _EXITKILL = 1, 1 << 20
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY = 1

# Calls that change files, names or locks: write, pwrite, writev, pwritev, sync, rename, link, unlink, mkdir,
# rmdir, truncate, fallocate, flock, msync; and openat where it makes a file.
_CHANGING = {
    "x86_64": {1, 18, 20, 26, 73, 74, 75, 76, 77, 82, 83, 84, 86, 87, 258, 263, 264, 265, 285, 296, 316},
    "aarch64": {32, 34, 35, 37, 38, 45, 46, 47, 64, 66, 68, 70, 82, 83, 227, 276},
}  # fmt: skip
_OPENAT = {"x86_64": 257, "aarch64": 56}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child ended.

    killed: whether it was killed; else it ended by itself.
    code: its exit code, 0 when all went well; 0 when it was killed.
    steps: calls that changed files, as far as it came; 0 without tracing.
    """

    killed: bool
    code: int
    steps: int


def fork(function: Callable[[], object], *, traced: bool = False) -> int:
    """Run a function in a child of this process, which should have no threads; the child's process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if traced:
            _libc.ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def can_trace() -> bool:
    """Whether this machine lets a process trace its child and tells which call it makes."""
    if platform.machine() not in _CHANGING:
        return False
    return kill_at_step(lambda: os.write(2, b""), 1 << 30).steps > 0


def kill_at_step(function: Callable[[], object], step: int) -> Outcome:
    """Run a function in a child and kill it as it enters its call number `step` that changes a file."""
    pid = fork(function, traced=True)
    steps = 0
    _, status = os.waitpid(pid, 0)
    if os.WIFSTOPPED(status):
        _libc.ptrace(_SETOPTIONS, pid, None, _TRACESYSGOOD | _EXITKILL)
    while os.WIFSTOPPED(status):
        stopped_by = os.WSTOPSIG(status)
        if stopped_by == _SYSCALL_STOP and _changes_a_file(pid):
            if steps >= step:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Outcome(killed=True, code=0, steps=steps)
            steps += 1
        passed_on = 0 if stopped_by in (_SYSCALL_STOP, signal.SIGSTOP, signal.SIGTRAP) else stopped_by
        _libc.ptrace(_SYSCALL, pid, None, passed_on)
        _, status = os.waitpid(pid, 0)
    return Outcome(killed=False, code=os.waitstatus_to_exitcode(status), steps=steps)


def _changes_a_file(pid: int) -> bool:
    """Whether a stopped child is about to make a call that changes a file, rather than leaving one."""
    info = ctypes.create_string_buffer(88)
    if _libc.ptrace(_GET_SYSCALL_INFO, pid, len(info), info) < 0 or info.raw[0] != _ENTRY:
        return False
    number, _, _, flags = struct.unpack_from("=4Q", info, 24)
    machine = platform.machine()
    return number in _CHANGING[machine] or (number == _OPENAT[machine] and bool(flags & os.O_CREAT))


def kill_after(function: Callable[[], object], seconds: float) -> Outcome:
    """Run a function in a child and kill it after some time unless it ends before."""
    pid = fork(function)
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return Outcome(killed=False, code=os.waitstatus_to_exitcode(status), steps=0)
        if time.monotonic() >= end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Outcome(killed=True, code=0, steps=0)
        time.sleep(0.0005)
