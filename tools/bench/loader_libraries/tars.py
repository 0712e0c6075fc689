"""WebDataset: tar shards with a shuffle buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import webdataset
from torch import Tensor

from tools.bench.loader_libraries.decoder import decode, stack
from tools.bench.loader_libraries.pictures import FirstBatchTask, PictureTask, data_loader, pictures_of
from tools.bench.storage_libraries.task import Task, key_of

_SHARD_ROWS = 256
_BUFFER_ROWS = 1000


def write_tars(folder: Path, data: Path, rows: int) -> None:
    """Tars of `rows` pictures, read by Energon as well."""
    folder.mkdir(exist_ok=True)
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=rows, verbose=0) as writer:
        for row, picture in enumerate(pictures_of(data)):
            writer.write({"__key__": key_of(row), "jpg": picture, "txt": f"a picture of number {row}"})


def picture(sample: dict[str, Any]) -> Any:
    """The decoded picture of a sample."""
    return decode(sample["jpg"])


def dataset(folder: Path, buffer_rows: int) -> Any:
    """Shards in random order, rows through a shuffle buffer, then the decoder."""
    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    return samples.shuffle(buffer_rows).map(picture)


class Pictures(PictureTask):
    def prepare(self) -> None:
        write_tars(self.folder, self.data, _SHARD_ROWS)

    def open_pictures(self) -> None:
        self.loader = data_loader(dataset(self.folder, _BUFFER_ROWS))

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


class First(FirstBatchTask):
    """Without a shuffle buffer, which would have to be filled first."""

    def prepare(self) -> None:
        write_tars(self.folder, self.data, 4)

    def first_batch(self) -> Tensor:
        samples = iter(dataset(self.folder, 1))
        return stack([next(samples) for _ in range(self.batch_size)])


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures, "first": First}
