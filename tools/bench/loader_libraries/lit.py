"""LitData: optimised chunks, streamed from a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.bench.loader_libraries.decoder import decode, stack
from tools.bench.loader_libraries.pictures import (
    BATCH_SIZE,
    NUM_WORKERS,
    FirstBatchTask,
    PictureTask,
    pictures_of,
)
from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before litdata
from tools.bench.storage_libraries.task import Task

from litdata import StreamingDataLoader, StreamingDataset  # isort: skip
from litdata.streaming import Cache  # isort: skip


def write_chunks(folder: Path, data: Path, rows: int) -> None:
    """Chunks of `rows` pictures, as `litdata.optimize` writes them, without its worker processes."""
    cache = Cache(str(folder / "chunks"), chunk_size=rows)
    for number, picture in enumerate(pictures_of(data)):
        cache._add_item(number, {"jpg": picture, "caption": f"a picture of number {number}"})
    cache.done()
    cache.merge(1)


class _Decoded(StreamingDataset):
    def __getitem__(self, index: Any) -> Any:
        return decode(super().__getitem__(index)["jpg"])


class Pictures(PictureTask):
    def prepare(self) -> None:
        write_chunks(self.folder, self.data, 256)

    def open_pictures(self) -> None:
        dataset = _Decoded(str(self.folder / "chunks"), shuffle=True)
        self.loader = StreamingDataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            num_workers=NUM_WORKERS,
            persistent_workers=True,
            collate_fn=stack,
        )

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


class First(FirstBatchTask):
    def prepare(self) -> None:
        write_chunks(self.folder, self.data, 4)

    def first_batch(self) -> Tensor:
        samples = iter(_Decoded(str(self.folder / "chunks"), shuffle=True))
        return stack([next(samples) for _ in range(self.batch_size)])


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures, "first": First}
