"""The plan of an ingest as a dataset of Ray Data: its rows are slices, which are mapped to receipts."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from datapipe.errors import WorkerError
from datapipe.outcomes import Met
from datapipe.ray_receipt import SliceReceipt
from datapipe.ray_slices import Slice, SliceRules, judge_slice
from datapipe.sources import Source
from datapipe.tally import Tally
from storage import StorageError

__all__ = ["RayPlan", "RunFolder"]

_MAX_DEATHS: Final = 5  # of the processes of one slice
_POLL_S: Final = 0.5  # how often a request to stop is looked for, by the driver and in tasks
_STOP_S: Final = 10.0  # how long tasks have to end once they were asked to


class RunFolder:
    """`STORE/reports/ray`, by which driver and tasks tell each other what Ray Data has no word for.

    The driver asks all tasks to end. Tasks count how often each slice was begun: Ray Data runs a task whose
    process died again and again, without end, and says nothing of it to the driver.
    """

    def __init__(self, store_path: Path) -> None:
        """Args:
        store_path: Reached by all processes.
        """
        self._path = store_path / "reports" / "ray"

    def __enter__(self) -> RunFolder:
        shutil.rmtree(self._path, ignore_errors=True)  # of a driver that was killed
        self._path.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    def ask_to_stop(self) -> None:
        """Let every task of the run end at its next sample."""
        (self._path / "stop").touch()

    def is_stopping(self) -> bool:
        """Whether tasks should end; true as well once the run is over."""
        return (self._path / "stop").exists() or not self._path.exists()

    def count_start(self, name: str) -> int:
        """How many processes have begun something, this one included."""
        with (self._path / f"begun-{name}").open("ab") as file:
            file.write(b".")
            file.flush()
            return os.fstat(file.fileno()).st_size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What a task needs beside the number of its slice."""

    slices: Sequence[Slice]
    sources: Sequence[Any]  # references in Ray's object store, so that a task loads its own source alone
    rules: SliceRules
    met: Mapping[int, Met]  # slice -> what earlier slices turned out to have
    folder: RunFolder
    round: int


class RayPlan:
    """Runs slices in tasks of Ray Data, as often as they are asked for."""

    def __init__(
        self,
        ray: Any,
        sources: Sequence[Source],
        slices: Sequence[Slice],
        rules: SliceRules,
        *,
        folder: RunFolder,
        workers: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """Args:
        ray: The module, initialized.
        sources: Of the run.
        slices: What they are cut into.
        rules: Of the run.
        folder: Shared with the tasks.
        workers: Tasks at a time.
        should_stop: Asked while tasks run; they then end at their next sample.
        """
        self._ray = ray
        self._sources = [ray.put(source) for source in sources]
        self._slices = slices
        self._rules = rules
        self._folder = folder
        self._workers = workers
        self._should_stop = should_stop
        self._num_rounds = 0
        self._stopped_at: float | None = None
        self._over = threading.Event()
        self._readers: list[threading.Thread] = []

    def receipts(self, numbers: Sequence[int], met: Mapping[int, Met]) -> Iterator[SliceReceipt]:
        """One receipt for each of these slices, as they come.

        After a request to stop, those of slices that were not read to their end are for what was read. A
        task that does not answer it ends the iteration after a while.

        Raises:
            WorkerError: When a slice failed for another reason than the death of its process, or its
                processes died again and again.
        """
        found: SimpleQueue[pa.Table | BaseException | None] = SimpleQueue()
        reader = threading.Thread(target=self._read, args=(self._dataset(numbers, met), found), daemon=True)
        self._readers.append(reader)
        reader.start()
        while not self._is_late():
            if self._stopped_at is None and self._should_stop():
                self._stopped_at = time.monotonic()
                self._folder.ask_to_stop()
            try:
                table = found.get(timeout=_POLL_S)
            except Empty:
                continue
            if table is None:
                return
            if isinstance(table, BaseException):
                raise table
            for receipt in SliceReceipt.from_table(table):
                if receipt.error:
                    raise WorkerError(receipt.error)
                yield receipt

    def close(self) -> None:
        """Ask the tasks that run to end, and wait for that a while."""
        self._folder.ask_to_stop()
        self._over.set()
        for reader in self._readers:
            reader.join(_STOP_S / len(self._readers))

    def _is_late(self) -> bool:
        return self._stopped_at is not None and time.monotonic() >= self._stopped_at + _STOP_S

    def _dataset(self, numbers: Sequence[int], met: Mapping[int, Met]) -> Any:
        self._num_rounds += 1
        work = _Work(
            slices=self._slices,
            sources=self._sources,
            rules=self._rules,
            met=met,
            folder=self._folder,
            round=self._num_rounds,
        )
        data = self._ray.data
        dataset = data.from_items(
            [{"slice": number} for number in numbers], override_num_blocks=len(numbers)
        ).map_batches(
            _judge_batch,
            batch_size=1,
            batch_format="pyarrow",
            compute=data.TaskPoolStrategy(size=min(self._workers, len(numbers))),
            num_cpus=1,
            fn_kwargs={"work": work},
        )
        dataset.context.enable_progress_bars = False
        return dataset

    def _read(self, dataset: Any, found: SimpleQueue[pa.Table | BaseException | None]) -> None:
        """Draw from a dataset in a thread of its own: a request to stop must be seen while nothing comes."""
        try:
            tables = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
            with closing(tables):  # ends the tasks that are left
                for table in tables:
                    found.put(table)
                    if self._over.is_set():
                        break
        except BaseException as error:  # raised again where receipts are waited for
            found.put(error)
        found.put(None)


def _judge_batch(batch: pa.Table, work: _Work) -> pa.Table:
    """The receipts of the slices whose numbers come in a batch; runs in a process of Ray."""
    return pa.concat_tables(
        _judge_numbered(number, work).to_table() for number in batch.column("slice").to_pylist()
    )


def _judge_numbered(number: int, work: _Work) -> SliceReceipt:
    import ray

    part = work.slices[number]
    source: Source = ray.get(work.sources[part.source_index])
    if work.folder.count_start(f"{work.round}-{number}") > _MAX_DEATHS + 1:
        return SliceReceipt(
            slice_number=number,
            error=f"{source.name}: a process that read it died {_MAX_DEATHS + 1} times; its memory may be "
            "too small (lower max_pixels), see the logs of Ray",
        )
    if work.folder.is_stopping():
        return SliceReceipt(slice_number=number, tally=Tally(is_interrupted=True))
    try:
        return judge_slice(
            number, source, part, work.rules, work.met.get(number, Met()), _stop_signal(work.folder)
        )
    except (StorageError, OSError, ValueError) as error:
        # As a row: Ray Data would pack it into an error of its own, with the traces of two processes.
        return SliceReceipt(slice_number=number, error=f"{source.name}: {type(error).__name__}: {error}")


def _stop_signal(folder: RunFolder) -> Callable[[], bool]:
    """Asks the folder now and then only, since it may lie on a slow file system."""
    asked = 0.0
    is_stopping = False

    def should_stop() -> bool:
        nonlocal asked, is_stopping
        if not is_stopping and time.monotonic() >= asked + _POLL_S:
            asked = time.monotonic()
            is_stopping = folder.is_stopping()
        return is_stopping

    return should_stop
