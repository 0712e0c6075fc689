"""Tables in folders named `column=value`, as Hive, Spark and pyarrow partition them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from datapipe.sources.fields import free_name
from datapipe.sources.remote import SourcePath

__all__ = ["Partitions", "is_partition", "partitions_of"]

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """What the folders of a table say about all of its rows."""

    folders: tuple[str, ...]  # their names as they are, outermost first
    columns: dict[str, str]  # name in the index to value


def is_partition(name: str) -> bool:
    """Whether a folder of this name stands for a column and its value."""
    column, mark, _ = name.partition("=")
    return bool(column and mark)


def partitions_of(table: SourcePath) -> Partitions:
    """The partitions that a table lies in, up to the first folder that is none."""
    parents = table.absolute().parts[:-1] if isinstance(table, Path) else tuple(table.path.split("/")[:-1])
    folders: list[str] = []
    while parents and is_partition(parents[-1]):
        folders.insert(0, parents[-1])
        parents = parents[:-1]
    columns: dict[str, str] = {}
    for folder in folders:
        column, _, value = folder.partition("=")
        if value != _NULL:
            columns[free_name(unquote(column))] = unquote(value)
    return Partitions(folders=tuple(folders), columns=columns)
