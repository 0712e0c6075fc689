"""Checkpoints written while training goes on: a thread copies the tensors and puts them on disk.

The copy has until the weights change, which is after the next rollout; what changes them waits for it.

Ranks agree through the files themselves, so that a rank that died while saving costs a time-out and no hang:
each writes its own part into a common folder and `rank-00001.json` last; the first rank waits for all of
these, writes `state.json` and renames the folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.errors import CheckpointError
from unirl.trainer.checkpoint import (
    FORMAT,
    FROZEN,
    OPTIMIZER,
    POLICY,
    STATE,
    digest,
    fingerprint,
    rank_file,
)
from unirl.trainer.checkpoint_folder import drop_unnamed, put_in_place, remove_leftovers, rotate
from unirl.trainer.frozen_part import FrozenPart, is_frozen
from unirl.trainer.host_copy import Fingerprint, HostCopy
from unirl.trainer.rng_state import read_rng_state
from unirl.trainer.tensor_pieces import model_tensors, optimizer_tensors, written_pieces

__all__ = ["CheckpointSaver", "save_checkpoint"]

log = logging.getLogger("unirl.trainer.checkpoint")

TIMEOUT_S = 600.0
"""How long the first rank waits for the others' parts."""
LOOK_EVERY_S = 0.02


class CheckpointSaver:
    """Saves checkpoints of one run on one rank, never two at a time. All ranks call it in the same order.

    Args:
        directories: Where to, one after the other: a fast folder of this machine, then the run's
            `checkpoints/`. Every rank sees the same ones.
        keep: Newest checkpoints that stay, at least 1; the best stays as well, see `rotate`.
        rank: This process.
        world_size: Number of processes.
        timeout_s: How long a rank waits for the others.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        keep: int,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._directories, self._keep, self._timeout_s = directories, keep, timeout_s
        self._rank, self._world_size = rank, world_size
        self._copies = {POLICY: HostCopy(), OPTIMIZER: HostCopy()}
        self._frozen = FrozenPart()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._num_saves = 0
        self._is_closed = False
        self.saved_step = -1
        """Step of the last checkpoint, whole or on its way; -1 if there is none."""
        self.whole_step = -1
        """Step of the last one that is whole, as far as was looked."""

    def save(
        self,
        *,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        rng: Mapping[str, Any] | None = None,
        judge: float | None = None,
        reward: float | None = None,
    ) -> None:
        """Begin to save. Waits where the checkpoint before is not written yet.

        Model and optimizer must not change before `wait_for_copy` has returned.

        Args:
            step: Steps done; names the checkpoint.
            model: Policy with critic; parameters and persistent buffers are saved, frozen parameters once.
            optimizer: Its tensors are saved; its settings are the run's.
            state: JSON values, the same on all ranks.
            rng: This rank's global generators, from `read_rng_state`; None reads them now.
            judge: What the held-out judge says of this policy, if it was asked and could tell.
            reward: What the reward says of it, if it was asked.

        Raises:
            CheckpointError: If the one before could not be written.
        """
        self.finish()
        held = model_tensors(model)
        tensors = {
            POLICY: {name: tensor for name, tensor in held.items() if not is_frozen(tensor)},
            OPTIMIZER: optimizer_tensors(model, optimizer),
            FROZEN: {name: tensor for name, tensor in held.items() if is_frozen(tensor)},
        }
        written = {kind: written_pieces(named, is_main=self._rank == 0) for kind, named in tensors.items()}
        frozen = written.pop(FROZEN)
        # Where ranks hold parts, each writes files of its own; otherwise the first writes all there is.
        is_whole = not any(metadata for _, metadata in (frozen, *written.values()))
        suffix = ".safetensors" if is_whole else f".{self._rank:05d}-of-{self._world_size:05d}.safetensors"
        kinds = written if self._rank == 0 or not is_whole else ()
        record = {
            "format": FORMAT,
            "step": step,
            "world_size": self._world_size,
            "judge": judge,
            "reward": reward,
        }
        self._num_saves += 1
        self.saved_step = step
        self._is_copied = threading.Event()
        self._writing = self._thread.submit(
            self._copy_and_write,
            {f"{kind}{suffix}": (self._copies[kind], *written[kind]) for kind in kinds},
            frozen,
            self._is_copied,
            name=f"step-{step:08d}",
            attempt=self._num_saves,
            record=json.loads(json.dumps({**record, "state": dict(state)})),
            rng=read_rng_state() if rng is None else rng,
        )

    def wait_for_copy(self) -> None:
        """Return when model and optimizer may change."""
        self._is_copied.wait()

    def poll(self) -> None:
        """Return at once, whatever is being written.

        Raises:
            CheckpointError: If the last one could not be written. It is said once.
        """
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is whole.

        Raises:
            CheckpointError: If it could not be written, or a rank's part did not come in time.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except CheckpointError:
            self.saved_step = -1
            raise
        self.whole_step = self.saved_step

    def close(self) -> None:
        """End the thread, after what this rank is writing; the other ranks' parts are not waited for."""
        self._is_closed = True
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.error("%s", error)
        self._writing = None

    def _copy_and_write(
        self,
        tensors: Mapping[str, tuple[HostCopy, dict[str, Tensor], dict[str, str]]],
        frozen: tuple[dict[str, Tensor], dict[str, str]],
        is_copied: threading.Event,
        **about: Any,
    ) -> None:
        try:
            for copy, named, metadata in tensors.values():
                copy.take(named, metadata=metadata)
            self._frozen.take(frozen[0], metadata=frozen[1], directories=self._directories)
        finally:
            is_copied.set()
        self._write(files={name: copy for name, (copy, _, _) in tensors.items()}, **about)

    def _write(
        self,
        *,
        name: str,
        attempt: int,
        files: Mapping[str, HostCopy],
        record: Mapping[str, Any],
        rng: Mapping[str, Any],
    ) -> None:
        """Write to all directories; one that fails does not keep the others from getting it."""
        failed = []
        for directory in self._directories:
            staging, is_whole = directory / f".{name}.{attempt}.partial", False
            try:
                self._write_part(staging, files, rng)
                self._publish(staging, directory / name, record)
                is_whole = True
                if self._rank == 0:
                    rotate(directory, newest=directory / name, keep=self._keep)
            except (OSError, CheckpointError) as error:
                failed.append(f"{directory / name}: {error}")
                if self._rank == 0 and not is_whole:
                    _abandoned(staging).touch()
                    shutil.rmtree(staging, ignore_errors=True)
        if failed:
            raise CheckpointError("; ".join(failed))
        self._frozen.release()

    def _write_part(self, staging: Path, files: Mapping[str, HostCopy], rng: Mapping[str, Any]) -> None:
        """Write this rank's files; where that fails, say so to the first rank."""
        staging.mkdir(parents=True, exist_ok=True)
        try:
            needed = sum(copy.num_bytes for copy in files.values())
            needed += self._frozen.missing_bytes(staging.parent)
            free = shutil.disk_usage(staging).free
            if needed > free:
                raise CheckpointError(f"{needed:,} bytes are needed and {free:,} are free")
            frozen = self._frozen.write(staging.parent)
            prints = {file: copy.write(staging / file) for file, copy in files.items()}
            _write_text(staging / rank_file(self._rank), {"files": prints, FROZEN: frozen, "rng": rng})
        except (OSError, CheckpointError) as error:
            with suppress(OSError):
                (staging / f"failed-{self._rank:05d}").write_text(str(error))
            raise

    def _publish(self, staging: Path, final: Path, record: Mapping[str, Any]) -> None:
        """Rename the folder once all parts are there; the other ranks wait for that."""
        deadline = time.monotonic() + self._timeout_s
        if self._rank:
            while staging.exists() and not _abandoned(staging).exists():
                self._wait(deadline, f"the first rank did not finish within {self._timeout_s:.0f} s")
            if _abandoned(staging).exists():
                shutil.rmtree(staging, ignore_errors=True)
                raise CheckpointError("the first rank gave it up")
            return
        files: dict[str, Fingerprint] = {}
        frozen: dict[str, Fingerprint] = {}
        for rank in range(self._world_size):
            part = staging / rank_file(rank)
            while not part.exists():
                for said in staging.glob("failed-*"):
                    raise CheckpointError(f"rank {int(said.name[-5:])} could not write: {said.read_text()}")
                self._wait(
                    deadline,
                    f"rank {rank} wrote no part within {self._timeout_s:.0f} s; all ranks have to save, look "
                    "whether that one is alive",
                )
            said_of = json.loads(part.read_text())
            files |= said_of["files"]
            frozen |= said_of[FROZEN]
            files[part.name] = fingerprint(part)
        whole = {**record, "files": files, FROZEN: frozen}
        _write_text(staging / STATE, {**whole, "xxh3_128": digest(whole)})
        _sync(staging)
        drop_unnamed(final.parent, also_named=frozen)
        put_in_place(staging, final)
        _sync(final.parent)

    def _wait(self, deadline: float, message: str) -> None:
        if self._is_closed or time.monotonic() > deadline:
            raise CheckpointError(message)
        time.sleep(LOOK_EVERY_S)


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
    judge: float | None = None,
    reward: float | None = None,
) -> Path:
    """Write one checkpoint of a single process, and return its directory when it is whole.

    Raises:
        CheckpointError: If it cannot be written.
    """
    remove_leftovers(directory)
    saver = CheckpointSaver([directory], keep=keep)
    try:
        saver.save(step=step, model=model, optimizer=optimizer, state=state, judge=judge, reward=reward)
        saver.finish()
    finally:
        saver.close()
    return directory / f"step-{step:08d}"


def _abandoned(staging: Path) -> Path:
    """The file by which the first rank says that it gave a checkpoint up."""
    return staging.with_suffix(".abandoned")


def _write_text(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON under another name, sync and rename: who sees the name sees all of it."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
