"""Batches out of a view of the store: threaded, in an exact order, resumable at any rank count."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from datapipe.batch_job import BatchSource
from datapipe.batching import Batches, Buckets, FixedBatches, Share
from datapipe.buckets import Balance, TokenBatches
from datapipe.collate import Batch
from datapipe.errors import LoaderError
from datapipe.fields import BatchContents, Field, ImageField, TextField
from datapipe.joined import JoinedView
from datapipe.loader_checks import (
    check_batch,
    check_between_batches,
    check_kinds,
    check_numbers,
    check_state,
    check_timeout,
)
from datapipe.loader_stats import LoaderMeter, LoaderStats
from datapipe.order import BlockShuffle, Order, ViewOrder
from datapipe.pipeline import StageCounters
from datapipe.stages import Pipeline, StageOptions
from datapipe.view_identity import hash_keys, hash_rows
from datapipe.whole_numbers import whole_number
from storage import View

__all__ = ["Batch", "ImageField", "Loader", "LoaderState", "TextField"]

_STATE_VERSION: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """Everything that a resume needs. Describes what was handed out, not what was prefetched."""

    version: int
    seed: int
    epoch: int
    consumed: int  # samples of the epoch handed out to all ranks together
    num_rows: int  # of the view
    rows_hash: int  # of the view's row ids: the upper 53 bits of their xxh3_64, exact in any JSON
    keys_hash: int  # of up to 4 of their keys, likewise; 0, or left out by older code: not known
    shuffle: int  # fingerprint of the order: 0 that of the view, 1 the block shuffle


class Loader:
    """Iterate over a view in global batches.

    Each `for` loop is one epoch; then the epoch counts up and the order changes. Rank r of n gets its
    contiguous share of each global batch, so that the ranks' batches, put together, are the one-rank batch.
    All ranks make the same number of steps. An iterator that is left early starts its epoch again; only
    `load_state_dict` makes the next one go on in the middle.
    """

    def __init__(
        self,
        view: View | JoinedView,
        *,
        batch_size: int | None = None,
        buckets: Buckets | None = None,
        image: ImageField | None = ImageField(size=(32, 32)),  # noqa: B008 - frozen
        tensors: Sequence[str] = (),
        columns: Sequence[str] = ("caption",),
        fields: Mapping[str, Field] | None = None,
        texts: Mapping[str, TextField] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        num_threads: int = 2,
        prefetch_batches: int = 2,
        timeout_s: float | None = 600.0,
        stages: Mapping[str, StageOptions] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Args:
        view: Rows to visit, from `store.select`, or those of a mixture.
        batch_size: Rows of a global batch, over all ranks; at least world_size.
        buckets: Instead of batch_size: `TokenBuckets` for texts, `PixelBuckets` for pictures.
        image: How blobs become pixels; None leaves them alone.
        tensors: Names of tensor columns.
        columns: Names of metadata columns.
        fields: Further tensors made from rows, such as clips of videos; by the name that they get in
            `batch.tensors`.
        texts: Metadata columns to tokenize; they come as `batch.tokens`.
        seed: Sets the order, together with the epoch.
        shuffle: False visits the rows in the order of the view.
        order: Another order than these two, such as `FullShuffle()`; then `shuffle` says nothing.
        drop_last: Leave out the last rows that do not fill a batch. They differ from epoch to epoch.
        rank: This process, 0 <= rank < world_size.
        world_size: Number of processes that share each batch.
        num_threads: Threads that read and decode.
        prefetch_batches: Batches being made or waiting; bounds memory.
        timeout_s: Seconds that a sample may take in a stage before that is an error; None waits.
        stages: How a stage is to run where it is not to run as these say: workers, queue, executor, budget.
        device: A CUDA device that batches are copied to ahead of their use; None leaves them to the host.

        Raises:
            LoaderError: For an unknown column, numbers out of range, or a view without a single batch.
            StageError: For a function that is to run in a process and cannot be sent to one; names it.
        """
        check_numbers(
            rank=rank,
            world_size=world_size,
            num_threads=num_threads,
            prefetch_batches=prefetch_batches,
            seed=seed,
        )
        check_batch(batch_size, buckets, world_size)
        check_timeout("timeout_s", timeout_s)
        names = {"tensors": tensors, "columns": columns}
        check_kinds(
            view=view, image=image, order=order, texts=texts, fields=fields, stages=stages, names=names
        )
        contents = BatchContents(
            image=image,
            tensors=tuple(tensors),
            columns=tuple(columns),
            fields=dict(fields or {}),
            texts=dict(texts or {}),
        )
        self._source = BatchSource(
            view,
            contents,
            num_threads=num_threads,
            prefetch_batches=prefetch_batches,
            timeout_s=timeout_s,
            options=stages or {},
            device=device,
        )
        self._view = view
        self._rows: NDArray[np.int64] = np.ascontiguousarray(view.rows, dtype=np.int64)
        self._batch_size, self._buckets, self._drop_last = int(batch_size or 0), buckets, drop_last
        self._batches = lru_cache(maxsize=2)(self._cut_epoch)
        self._seed = int(seed)
        self._order: Order = order or (BlockShuffle() if shuffle else ViewOrder())
        self._num_samples = self._order.num_samples(len(self._rows))
        self._rank, self._world_size = int(rank), int(world_size)
        self._stage_counters = [
            StageCounters(name=stage.name, concurrency=stage.concurrency) for stage in self.pipeline.stages
        ]
        self._running: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
        self._meter = LoaderMeter(view.store, self._stage_counters)
        self._epoch = self._consumed = self._start_at = 0
        if len(self) == 0:
            wanted = f"not one batch of {batch_size}" if buckets is None else "not one full batch"
            raise LoaderError(
                f"an epoch is {self._num_samples} samples out of {len(view)} rows, {wanted}; "
                f"lower batch_size or the budget, widen the query, or set drop_last=False"
            )

    def __reduce__(self) -> tuple[object, ...]:
        raise LoaderError(
            "a loader has threads and open files and cannot be pickled or copied; send its view, make a "
            "loader of it on the other side, and send state_dict() along to go on"
        )

    def __len__(self) -> int:
        """Batches of the whole epoch `self.epoch`, the same on every rank; with buckets epochs differ."""
        return self._batches(self._epoch).count(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration visits, or that the running one is in."""
        return self._epoch

    def balance(self) -> Balance:
        """Padding and balance of the ranks in the epoch `self.epoch`.

        Raises:
            LoaderError: Without buckets, since only their lengths are known.
        """
        batches = self._batches(self._epoch)
        if not isinstance(batches, TokenBatches):
            raise LoaderError("the loader knows no lengths of rows; give it buckets=TokenBuckets(...)")
        return batches.balance(self._world_size)

    @property
    def pipeline(self) -> Pipeline:
        """The stages, their workers and bounds; `print(loader.pipeline)` shows them."""
        return self._source.pipeline

    def stats(self) -> LoaderStats:
        """Samples, bytes, and the times of the stages and of the caller, over all iterations so far."""
        return self._meter.stats()

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of an epoch, 0 or more."""
        self._epoch, self._consumed, self._start_at = whole_number("epoch", epoch, 0), 0, 0

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over what is left of the epoch; threads run until the iterator ends or is dropped.

        Raises:
            SampleError: When more samples cannot be read or decoded than may be left out; names key and row.
        """
        epoch, start, self._start_at = self._epoch, self._start_at, 0
        batches = self._iterate(epoch, start)
        self._running.add(batches)
        return batches

    def forever(self) -> Iterator[Batch]:
        """Iterate over epoch after epoch without end."""
        while True:
            yield from self

    def close(self) -> None:
        """End all iterations that are under way, their threads and processes, and give back memory.

        Raises:
            LoaderError: If one of them waits for its next batch right now, in another thread or below a
                signal handler. It goes on; the others are ended.
        """
        waiting = 0
        for batches in list(self._running):
            if inspect.getgeneratorstate(batches) == inspect.GEN_RUNNING:
                waiting += 1
            else:
                batches.close()
        self._source.close()
        if waiting:
            raise LoaderError(
                f"{waiting} iterations wait for their next batch, in another thread or below a signal "
                f"handler, and cannot be ended from here; leave their loops, by an exception in the handler "
                f"or a flag that the thread looks at, and close the loader then"
            )

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch handed out, as plain integers for JSON."""
        return {
            "version": _STATE_VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "num_rows": len(self._rows),
            "rows_hash": self._rows_hash,
            "keys_hash": self._keys_hash,
            "shuffle": self._fingerprint(),
        }

    @cached_property
    def _rows_hash(self) -> int:
        return hash_rows(self._rows)

    @cached_property
    def _keys_hash(self) -> int:
        return hash_keys(self._view)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration go on right after the last batch that was handed out.

        Rank, world size, threads, prefetch and batch size may differ from those of the saving loader. The
        state of a finished epoch gives an iteration that ends at once; the next one is the new epoch.

        Raises:
            LoaderError: If the state is of another version, or was made over other rows, over rows of these
            numbers that are other samples, or in another order.
        """
        check_state(state, self.state_dict(), self._num_samples)
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        check_between_batches(consumed, self._batches(epoch))
        self._epoch, self._consumed, self._start_at = epoch, consumed, consumed

    def _iterate(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        self._epoch, self._consumed = epoch, start
        shares, batches = self._shares(epoch, start), self._batches(epoch)
        made = self._source.batches(
            shares,
            seed=self._seed,
            epoch=epoch,
            counters=self._stage_counters,
            bad_by_reason=self._meter.bad,
        )
        for index, batch in enumerate(self._meter.timed(made)):
            self._epoch, self._consumed = epoch, batches.bounds(start, index)[1]
            yield batch
        self._epoch, self._consumed = epoch + 1, 0

    def _shares(self, epoch: int, start: int) -> Iterator[Share]:
        batches = self._batches(epoch)
        for index in range(batches.count(start)):
            positions = batches.take(*batches.bounds(start, index))
            low, high = batches.share(positions, rank=self._rank, world_size=self._world_size)
            yield Share(positions=positions[low:high], image_size=batches.image_size(positions))

    def _cut_epoch(self, epoch: int) -> Batches:
        num_rows, num_samples = len(self._rows), self._num_samples
        positions = self._order.positions(num_rows, seed=self._seed, epoch=epoch)
        if self._buckets is None:
            return FixedBatches(
                positions=positions,
                num_samples=num_samples,
                batch_size=self._batch_size,
                drop_last=self._drop_last,
            )
        return self._buckets.batches(
            positions,
            num_rows=num_rows,
            num_samples=num_samples,
            seed=self._seed,
            epoch=epoch,
            drop_last=self._drop_last,
        )

    def _fingerprint(self) -> int:
        order = self._order.fingerprint()
        return order if self._buckets is None else order ^ self._buckets.fingerprint()
