"""MosaicML Streaming: MDS shards, read from a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.bench.loader_libraries.decoder import decode, stack
from tools.bench.loader_libraries.pictures import (
    BATCH_SIZE,
    FirstBatchTask,
    PictureTask,
    data_loader,
    pictures_of,
)
from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before streaming
from tools.bench.storage_libraries.task import Task

from streaming import MDSWriter, StreamingDataset  # isort: skip


def write_shards(folder: Path, data: Path, size_limit: int) -> None:
    """Shards of up to `size_limit` bytes."""
    columns = {"jpg": "bytes", "caption": "str"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=size_limit) as writer:
        for row, picture in enumerate(pictures_of(data)):
            writer.write({"jpg": picture, "caption": f"a picture of number {row}"})


class _Decoded(StreamingDataset):
    def __getitem__(self, index: Any) -> Any:
        return decode(super().__getitem__(index)["jpg"])


class Pictures(PictureTask):
    def prepare(self) -> None:
        write_shards(self.folder, self.data, 1 << 24)

    def open_pictures(self) -> None:
        dataset = _Decoded(local=str(self.folder / "mds"), batch_size=BATCH_SIZE, shuffle=True)
        self.loader = data_loader(dataset)

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


class First(FirstBatchTask):
    """Rows by number: its shuffled stream first waits for threads of its own."""

    def prepare(self) -> None:
        pictures = pictures_of(self.data)
        write_shards(self.folder, self.data, 4 * sum(map(len, pictures)) // len(pictures))

    def first_batch(self) -> Tensor:
        dataset = _Decoded(local=str(self.folder / "mds"), batch_size=self.batch_size)
        stride = len(dataset) // self.batch_size
        return stack([dataset[row * stride] for row in range(self.batch_size)])


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures, "first": First}
