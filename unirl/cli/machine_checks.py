"""What `unirl doctor` looks at: GPUs, cores, memory, disk. Each check says what it found and what to do."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from unirl.cli.check import Check, Status
from unirl.cli.software_checks import (
    check_decoders,
    check_extras,
    check_python,
    check_requirements,
    check_vllm,
)

__all__ = ["check_machine"]

GIB: Final = 1 << 30
MIB: Final = 1 << 20
DISK_TRY_BYTES: Final = 64 * MIB
LEAST_MEMORY_BYTES: Final = 2 * GIB
LEAST_SHARED_BYTES: Final = GIB
LEAST_DISK_BYTES: Final = 5 * GIB
SLOW_DISK_BYTES_PER_S: Final = 50 * MIB
LEAST_OPEN_FILES: Final = 1024
CONTROL_GROUP: Final = Path("/sys/fs/cgroup")


def check_machine(folder: Path, *, deep: bool = False) -> list[Check]:
    """Look at everything; nothing is left behind.

    Args:
        folder: An existing folder; its disk is written to and read from.
        deep: Also import vLLM in a process of its own, and compute on every GPU.
    """
    return [
        check_python(),
        check_requirements(),
        *check_extras(),
        check_vllm(deep=deep),
        *check_gpus(deep=deep),
        check_processors(),
        check_memory(),
        check_shared_memory(),
        check_open_files(),
        *check_disk(folder),
        *check_decoders(),
    ]


def check_gpus(*, deep: bool) -> Iterator[Check]:
    """The accelerators that torch sees, and whether there is one that it does not see."""
    import torch

    if not torch.cuda.is_available():
        yield _no_gpu(torch.version.cuda)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = (
            f"{facts.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
            f"compute {facts.major}.{facts.minor}, CUDA {torch.version.cuda}"
        )
        status: Status = "warning"
        remedy = ""
        if deep and not _adds_up(index):
            status = "problem"
            remedy = (
                "it computes wrongly: take it out (CUDA_VISIBLE_DEVICES) and look at `dmesg` for its errors"
            )
        elif facts.major < 8:
            remedy = "no bfloat16 in hardware: use float32, or a GPU of compute 8.0 or more"
        elif free < total / 2:
            remedy = "half of it or more is taken: `nvidia-smi` names the processes"
        if deep and status != "problem":
            found += ", adds up"
        yield Check(name=f"gpu {index}", status=status if remedy else "ok", found=found, remedy=remedy)


def _adds_up(index: int) -> bool:
    """Whether a GPU gives the sum of a product whose value is known."""
    import torch

    ones = torch.ones(256, 256, device=f"cuda:{index}")
    return float((ones @ ones).sum()) == 256.0**3


def _no_gpu(cuda: str | None) -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check(
            name="gpu", status="note", found="none; runs use the CPU, which is enough for toy models"
        )
    if cuda is None:
        return Check(
            name="gpu",
            status="problem",
            found="there is a driver, but this torch is built for CPUs",
            remedy="install torch again from an index with CUDA builds",
        )
    return Check(
        name="gpu",
        status="problem",
        found=f"there is a driver, but torch (CUDA {cuda}) sees no GPU",
        remedy="look at `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container, give it the GPU (--gpus all)",
    )


def check_processors() -> Check:
    """How many cores this process may use, and how many threads it was told to."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("OMP_NUM_THREADS")
    found = f"{usable} usable" + (f", OMP_NUM_THREADS={told}" if told else "")
    if told and told.isdecimal() and int(told) > usable:
        return Check(
            name="cores",
            status="warning",
            found=found,
            remedy=f"threads would wait for each other: export OMP_NUM_THREADS={usable} or less",
        )
    return Check(name="cores", status="ok", found=found)


def check_memory() -> Check:
    """Memory that can be taken now, within the limit of the container."""
    import psutil

    facts = psutil.virtual_memory()
    total, available = facts.total, facts.available
    limit, taken = _container_memory()
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - taken)
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < LEAST_MEMORY_BYTES:
        return Check(
            name="memory",
            status="warning",
            found=found,
            remedy="end other programs; a toy run takes about 2 GiB, see docs/scaling.md for larger models",
        )
    return Check(name="memory", status="ok", found=found)


def check_shared_memory() -> Check:
    """What processes hand tensors to each other through: NCCL, vLLM, loader workers."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check(name="shared memory", status="note", found="no /dev/shm on this system")
    usage = shutil.disk_usage(place)
    found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {place}"
    if usage.free < LEAST_SHARED_BYTES:
        return Check(
            name="shared memory",
            status="warning",
            found=found,
            remedy="in a container: --shm-size=8g or --ipc=host (Kubernetes: an emptyDir of medium Memory)",
        )
    return Check(name="shared memory", status="ok", found=found)


def check_open_files() -> Check:
    """Shards are mapped, so that a large store wants many open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_OPEN_FILES:
        return Check(
            name="open files",
            status="warning",
            found=f"at most {soft}",
            remedy=f"ulimit -n {4 * LEAST_OPEN_FILES}, or `unirl compact` for a store of fewer parts",
        )
    return Check(name="open files", status="ok", found=f"at most {soft}")


def check_disk(folder: Path) -> Iterator[Check]:
    """Room, speed, and whether a snapshot can be published: by a link that fails if the name is taken."""
    usage = shutil.disk_usage(folder)
    is_full = usage.free < LEAST_DISK_BYTES
    yield Check(
        name="disk room",
        status="warning" if is_full else "ok",
        found=f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {folder.resolve()}",
        remedy="make room, or name another place with --folder and --run" if is_full else "",
    )
    scratch = folder / f".unirl-doctor-{uuid.uuid4().hex}"
    try:
        scratch.mkdir()
        yield _disk_speed(scratch / "data")
        yield _publishing(scratch)
    except OSError as error:
        yield Check(
            name="disk",
            status="problem",
            found=f"{folder}: cannot be written to ({error.strerror})",
            remedy="make room" if error.errno == errno.ENOSPC else "name a folder of your own with --folder",
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _disk_speed(path: Path) -> Check:
    block = os.urandom(MIB)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(DISK_TRY_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = DISK_TRY_BYTES / (time.perf_counter() - started)
    is_slow = rate < SLOW_DISK_BYTES_PER_S
    return Check(
        name="disk speed",
        status="warning" if is_slow else "ok",
        found=f"writes {rate / MIB:.0f} MiB/s (64 MiB with fsync)",
        remedy="keep runs and checkpoints on a local disk; this one is slow or busy" if is_slow else "",
    )


def _publishing(scratch: Path) -> Check:
    first, published = scratch / "first", scratch / "published"
    first.write_bytes(b"1")
    os.link(first, published)
    try:
        os.link(first, published)
    except FileExistsError:
        return Check(name="file system", status="ok", found="snapshots are published exclusively")
    return Check(
        name="file system",
        status="problem",
        found="a second link of one name is not refused, so that two writers could overwrite each other",
        remedy="put stores on a local disk, or let one machine write",
    )


def _container_memory() -> tuple[int | None, int]:
    """The container's limit, if there is one, and what is taken of it beside files that can be let go."""
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        current = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None, 0
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return (int(limit) if limit.isdecimal() else None), max(0, current - cached)
