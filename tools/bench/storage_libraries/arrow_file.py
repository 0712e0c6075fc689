"""pyarrow alone: compute functions over a mapped Arrow file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tools.bench.storage_libraries.task import FilterTask, Task


class Filter(FilterTask):
    """Two masks over the mapped columns."""

    def prepare(self) -> None:
        table = pq.read_table(self.data / "samples.parquet")
        path = str(self.folder / "samples.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    def open(self) -> None:
        self.table = pa.ipc.open_file(pa.memory_map(str(self.folder / "samples.arrow"))).read_all()

    def rows(self) -> np.ndarray:
        wide = pc.greater(self.table.column("width"), 300)
        red = pc.match_substring(self.table.column("caption"), "red")
        return pc.indices_nonzero(pc.and_(wide, red)).to_numpy()


TASKS: dict[str, Callable[[Path, Path], Task]] = {"filter": Filter}
