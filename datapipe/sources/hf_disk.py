"""Folders that `datasets.save_to_disk` writes: which Arrow files belong to them, and to which split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from datapipe.errors import SourceError
from datapipe.sources.remote import SourcePath

__all__ = ["HfTable", "hf_tables", "is_hf_folder"]

_DICT_FILE = "dataset_dict.json"
_STATE_FILE = "state.json"

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTable:
    """One Arrow file of a saved dataset."""

    path: SourcePath
    split: str | None  # None for a dataset that was saved without splits


def is_hf_folder(folder: SourcePath) -> bool:
    """Whether the folder holds a saved dataset, or a dictionary of them."""
    return (folder / _DICT_FILE).is_file() or (folder / _STATE_FILE).is_file()


def hf_tables(folder: SourcePath) -> list[HfTable]:
    """The Arrow files in the order of the dataset.

    Raises:
        SourceError: If the folder is no saved dataset, or its list of files is broken or leaves the folder.
    """
    if (folder / _DICT_FILE).is_file():
        splits = _read(folder / _DICT_FILE, "splits", str)
        return [table for split in splits for table in _tables_of(folder / split, split)]
    return _tables_of(folder, None)


def _tables_of(folder: SourcePath, split: str | None) -> list[HfTable]:
    tables: list[HfTable] = []
    for entry in _read(folder / _STATE_FILE, "_data_files", dict):
        name = str(entry.get("filename"))
        if "/" in name or "\\" in name or name in ("", ".", "..") or not (folder / name).is_file():
            raise SourceError(
                f"{folder / _STATE_FILE}: lists {name!r}, which is not in {folder}; save it again"
            )
        tables.append(HfTable(path=folder / name, split=split))
    return tables


def _read(path: SourcePath, field: str, kind: type[Item]) -> list[Item]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[field]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path}: not the description of a saved dataset ({error!r}); save it again"
        ) from error
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise SourceError(
            f"{path}: {field} is {found!r:.80}, wanted a list of {kind.__name__}; save it again"
        )
    return found
