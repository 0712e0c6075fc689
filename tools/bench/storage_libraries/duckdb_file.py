"""DuckDB alone, over one Parquet file and over its own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np

from tools.bench.storage_libraries.task import FilterTask, Task


class Parquet(FilterTask):
    """One query over one Parquet file with row numbers; the connection stays open."""

    def prepare(self) -> None:
        duckdb.sql(
            f"COPY (SELECT file_row_number AS row, * EXCLUDE (file_row_number) FROM "
            f"read_parquet('{self.data / 'samples.parquet'}', file_row_number = true)) "
            f"TO '{self.folder / 'samples.parquet'}' (FORMAT parquet, COMPRESSION zstd)"
        )

    def open(self) -> None:
        self.connection = duckdb.connect()
        self.table = f"read_parquet('{self.folder / 'samples.parquet'}')"

    def rows(self) -> np.ndarray:
        sql = f"SELECT row FROM {self.table} WHERE width > 300 AND contains(caption, 'red')"
        return self.connection.sql(sql).fetchnumpy()["row"]


class OwnFile(Parquet):
    """The same table in DuckDB's own file."""

    def prepare(self) -> None:
        with duckdb.connect(str(self.folder / "samples.duckdb")) as connection:
            connection.execute(
                f"CREATE TABLE samples AS SELECT file_row_number AS row, * EXCLUDE (file_row_number) FROM "
                f"read_parquet('{self.data / 'samples.parquet'}', file_row_number = true)"
            )

    def open(self) -> None:
        self.connection = duckdb.connect(str(self.folder / "samples.duckdb"), read_only=True)
        self.table = "samples"


TASKS: dict[str, Callable[[Path, Path], Task]] = {"filter": Parquet, "filter_own": OwnFile}
