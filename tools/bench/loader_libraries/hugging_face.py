"""Hugging Face datasets: Arrow files in a save_to_disk folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch import Tensor

from tools.bench.loader_libraries.decoder import decode
from tools.bench.loader_libraries.pictures import PictureTask, data_loader, pictures_of
from tools.bench.storage_libraries.task import Task


def decoded(rows: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
    """The transform of a batch of rows."""
    return {"pixels": [decode(data) for data in rows["jpg"]]}


class _Pictures:
    """Rows in lists, which datasets fetches at once, as pictures."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: list[int]) -> list[np.ndarray]:
        return [row["pixels"] for row in self.dataset.__getitems__(rows)]


class Pictures(PictureTask):
    def prepare(self) -> None:
        features = datasets.Features({"jpg": datasets.Value("binary"), "caption": datasets.Value("string")})
        pictures = pictures_of(self.data)
        rows = {"jpg": pictures, "caption": [f"a picture of number {row}" for row in range(len(pictures))]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(self.folder / "saved")

    def open_pictures(self) -> None:
        dataset = datasets.load_from_disk(self.folder / "saved").with_transform(decoded)
        self.loader = data_loader(_Pictures(dataset), shuffle=True)

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures}
