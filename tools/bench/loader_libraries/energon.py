"""Megatron Energon: indexed tars."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tools.bench.loader_libraries.decoder import decode, stack
from tools.bench.loader_libraries.pictures import (
    BATCH_SIZE,
    NUM_WORKERS,
    FirstBatchTask,
    PictureTask,
    pictures_of,
)
from tools.bench.loader_libraries.tars import write_tars
from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before energon
from tools.bench.storage_libraries.task import Task

from megatron.energon import (  # isort: skip
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)


@edataclass
class _Picture(Sample):
    pixels: np.ndarray


@stateless
def cook(sample: dict[str, Any]) -> _Picture:
    """The decoded picture of a sample."""
    return _Picture(**basic_sample_keys(sample), pixels=decode(sample["jpg"]))


class _Pictures(DefaultTaskEncoder):
    decoder = None
    cookers = (Cooker(cook),)

    def batch(self, samples: list[_Picture]) -> Tensor:
        return stack([sample.pixels for sample in samples])


def prepare(folder: Path, data: Path, rows: int) -> None:
    """Tars, and the index beside them that Energon reads."""
    write_tars(folder, data, rows)
    command = [str(Path(sys.executable).with_name("energon")), "prepare", "--non-interactive"]
    options = ["--no-progress", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    subprocess.run([*command, *options, str(folder)], check=True, stdin=subprocess.DEVNULL)


def loader(folder: Path, *, batch_size: int, num_workers: int, buffer_rows: int, length: int) -> Any:
    """A training loader over the tars."""
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=batch_size,
        shuffle_buffer_size=buffer_rows,
        max_samples_per_sequence=None,
        virtual_epoch_length=length,
        task_encoder=_Pictures(),
    )
    return get_loader(dataset)


class Pictures(PictureTask):
    """As many batches as an epoch has, out of its endless stream."""

    def prepare(self) -> None:
        prepare(self.folder, self.data, 256)

    def open_pictures(self) -> None:
        length = len(pictures_of(self.data)) // BATCH_SIZE
        self.loader = loader(
            self.folder, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, buffer_rows=1000, length=length
        )

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return self.loader


class First(FirstBatchTask):
    def prepare(self) -> None:
        prepare(self.folder, self.data, 4)

    def first_batch(self) -> Tensor:
        batches: Iterator[Tensor] = iter(
            loader(self.folder, batch_size=self.batch_size, num_workers=0, buffer_rows=1, length=0)
        )
        return next(batches)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures, "first": First}
