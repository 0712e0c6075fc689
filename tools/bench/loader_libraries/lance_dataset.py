"""Lance: columnar files with random access."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from torch import Tensor

from tools.bench.loader_libraries.decoder import decode
from tools.bench.loader_libraries.pictures import PictureTask, data_loader, pictures_of
from tools.bench.storage_libraries.task import Task


class _Pictures:
    """Rows in lists, by `take`. The data set is opened in each worker: it must not be used across a fork."""

    def __init__(self, path: str, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows
        self.dataset: lance.LanceDataset | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitems__(self, rows: list[int]) -> list[np.ndarray]:
        if self.dataset is None:
            self.dataset = lance.dataset(self.path)
        taken = self.dataset.take(rows, columns=["jpg"]).column("jpg")
        return [decode(memoryview(data.as_buffer()).cast("B")) for data in taken]


class Pictures(PictureTask):
    def prepare(self) -> None:
        pictures = pictures_of(self.data)
        captions = [f"a picture of number {row}" for row in range(len(pictures))]
        table = pa.table({"jpg": pa.array(pictures, pa.large_binary()), "caption": pa.array(captions)})
        lance.write_dataset(table, self.folder / "data.lance")

    def open_pictures(self) -> None:
        num_rows = lance.dataset(self.folder / "data.lance").count_rows()
        pictures = _Pictures(str(self.folder / "data.lance"), num_rows)
        self.loader = data_loader(pictures, shuffle=True, multiprocessing_context="spawn")

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures}
