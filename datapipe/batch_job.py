"""How the rows of one batch are read, decoded and put together: the stages, declared, and their run."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.bad_samples import BadSampleBudget
from datapipe.batch_stages import Collate, Fetch, ToDevice, on_device
from datapipe.batching import Share
from datapipe.collate import Batch
from datapipe.device import CudaStreams, DeviceCopier, cuda_device
from datapipe.draft import IMAGES, Draft, Piece
from datapipe.errors import LoaderError
from datapipe.fields import BatchContents
from datapipe.joined import JoinedView, reader_of
from datapipe.pipeline import StageCounters, run_pipeline
from datapipe.ring import BufferRing
from datapipe.sample_stages import (
    DecodeSamples,
    TokenizeSample,
    TokenizeSamples,
    TransformSample,
    TransformSamples,
    check_parts_travel,
    decode_function,
)
from datapipe.stages import STALL_S, Pipeline, Samples, Stage, StageOptions
from storage import View

__all__ = ["BatchSource"]

_GROUP_BYTES: Final = 4 << 20
_GROUP_BATCHES: Final = 32
_GROUP_ROWS: Final = 4096  # their keys and metadata are Python objects
_IN_THREADS_ONLY: Final = ("fetch", "collate", "device")


class BatchSource:
    """Makes batches from positions in a view."""

    def __init__(
        self,
        view: View | JoinedView,
        contents: BatchContents,
        *,
        num_threads: int,
        prefetch_batches: int,
        timeout_s: float | None,
        options: Mapping[str, StageOptions],
        device: Any,
    ) -> None:
        store = view.store
        _check_names("column", contents.read_columns, store.columns)
        _check_names("tensor column", contents.tensors, store.tensor_columns)
        taken = {IMAGES, *contents.tensors} & set(contents.fields)
        if taken:
            raise LoaderError(f"fields are named {sorted(taken)}, which the batch has already; rename them")
        self._rows: NDArray[np.int64] = np.ascontiguousarray(view.rows, dtype=np.int64)
        self._contents = contents
        self._tensors = {name: store.tensor(name) for name in contents.tensors}
        wanted = cuda_device(device)
        self._copier = None if wanted is None else DeviceCopier(CudaStreams(wanted))
        num_arrays = len(contents.tensors) + len(contents.fields) + 1
        self._ring = BufferRing(
            num_kept=(prefetch_batches + 2) * num_arrays, is_pinned=self._copier is not None
        )
        self._options = dict(options)
        self._num_threads, self._timeout_s = num_threads, timeout_s
        workers = [num_threads, *(made.concurrency or 1 for made in options.values())]
        self._num_pieces = max(workers) if contents.is_per_sample else 1
        # Pieces of one batch more would hold the memory of a whole one.
        self._max_in_flight = max(self._num_pieces, (prefetch_batches - 1) * self._num_pieces + 1)
        stages = tuple(self._stages(view))
        _check_names("stage", options, [stage.name for stage in stages], of="the loader")
        self.pipeline = Pipeline(stages=stages, max_in_flight=self._max_in_flight, watchdog_s=STALL_S)
        # Budgets are of samples. A piece left out whole would take its batch along, and a step of the rank.
        self._strict = replace(self.pipeline, stages=tuple(replace(each, max_failures=0) for each in stages))

    def batches(
        self,
        shares: Iterator[Share],
        *,
        seed: int,
        epoch: int,
        counters: Sequence[StageCounters],
        bad_by_reason: Counter[str],
    ) -> Iterator[Batch]:
        """Batches of places in the view, in order. Transforms and fields draw by seed and epoch."""
        budget = BadSampleBudget(self.pipeline, bad_by_reason)
        drafts = (self._draft(share, seed, epoch) for share in shares)
        pieces = ((piece, piece) for piece in self._pieces(drafts))
        with closing(run_pipeline(self._strict, pieces, counters=counters)) as done:  # type: ignore[type-var]
            for piece in done:
                # What was handed out is referred to by nothing here, so that its memory can be lent again.
                finished = piece.drafts[::-1] if piece.is_last else []
                piece.let_go()
                while finished:
                    yield self._finish(finished.pop(), budget)

    def close(self) -> None:
        """Let go of the memory that waits for the next batches."""
        self._ring.clear()
        if self._copier is not None:
            self._copier.close()

    def _finish(self, draft: Draft, budget: BadSampleBudget) -> Batch:
        budget.check(draft)
        batch = draft.batch
        if batch is None:
            raise LoaderError(f"rows {draft.rows} came through the stages without being put together")
        if self._copier is None or draft.in_flight is None:
            return batch
        return on_device(batch, self._copier.hand_out(draft.in_flight))

    def _draft(self, share: Share, seed: int, epoch: int) -> Draft:
        image = self._contents.image
        size = share.image_size or (None if image is None else image.size)
        return Draft(rows=self._rows[share.positions], size=size, seed=seed, epoch=epoch, ring=self._ring)

    def _pieces(self, drafts: Iterator[Draft]) -> Iterator[Piece]:
        """Parts of batches where rows take work; else several batches at once, more and more of them."""
        if self._contents.is_per_sample:
            for draft in drafts:
                yield from draft.pieces(self._num_pieces)
            return
        row_bytes = sum(made.dtype.itemsize * int(np.prod(made.shape)) for made in self._tensors.values())
        wanted = 1
        while group := list(islice(drafts, wanted)):
            num_rows = max(len(draft.rows) for draft in group)
            yield Piece(drafts=group, start=0, stop=len(group[0].rows), at=0)
            most = min(_GROUP_BYTES // max(1, row_bytes * num_rows), _GROUP_ROWS // max(1, num_rows))
            wanted = max(1, min(2 * wanted, most, _GROUP_BATCHES))

    def _stages(self, view: View | JoinedView) -> Iterator[Stage]:
        held, image = self._contents, self._contents.image
        columns = reader_of(view, held.read_columns)
        yield self._stage(
            "fetch",
            Fetch(
                view.store,
                columns=columns,
                tensors=self._tensors,
                contents=held,
                is_staged=self._copier is not None,
            ),
        )
        if image is not None or held.fields:
            is_sent = self._is_process("decode")
            if is_sent:
                fields = {f"fields[{name!r}]": field for name, field in held.fields.items()}
                check_parts_travel("decode", fields)
            samples = DecodeSamples(image, held.fields, is_sent=is_sent)
            yield self._stage("decode", decode_function(image, held.fields), samples)
        if image is not None and image.transforms:
            if self._is_process("transform"):
                parts = {f"transforms[{place}]": part for place, part in enumerate(image.transforms)}
                check_parts_travel("transform", parts)
            yield self._stage("transform", TransformSample(image.transforms), TransformSamples(image))
        if held.texts:
            if self._is_process("tokenize"):
                tokenizers = {
                    f"texts[{name!r}].tokenizer": text.tokenizer for name, text in held.texts.items()
                }
                check_parts_travel("tokenize", tokenizers)
            yield self._stage("tokenize", TokenizeSample(dict(held.texts)), TokenizeSamples(held.texts))
        yield self._stage("collate", Collate(held, columns), concurrency=0)
        if self._copier is not None:
            yield self._stage("device", ToDevice(self._copier), concurrency=1)

    def _is_process(self, name: str) -> bool:
        return name in self._options and self._options[name].executor == "process"

    def _stage(
        self,
        name: str,
        function: Callable[[Any], Any],
        samples: Samples | None = None,
        concurrency: int | None = None,
    ) -> Stage:
        wanted = self._options.get(name, StageOptions())
        if name in _IN_THREADS_ONLY and wanted.executor != "thread":
            raise LoaderError(
                f"stage {name!r}: executor is {wanted.executor!r}; it hands on memory of this process, "
                f"leave it in threads"
            )
        if name in ("collate", "device") and wanted.max_failures:
            raise LoaderError(
                f"stage {name!r}: max_failures is {wanted.max_failures}; it works on whole batches and "
                f"loses no sample, leave it at 0"
            )
        return Stage(
            name=name,
            function=function,
            concurrency=next(
                given for given in (wanted.concurrency, concurrency, self._num_threads) if given is not None
            ),
            queue_size=wanted.queue_size or self._max_in_flight,
            executor=wanted.executor,
            max_failures=wanted.max_failures,
            timeout_s=wanted.timeout_s or self._timeout_s,
            samples=samples,
        )


def _check_names(what: str, names: Iterable[str], known: Iterable[str], of: str = "the store") -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LoaderError(f"{of} has no {what} {name!r}; it has {sorted(known)}{hint}")
