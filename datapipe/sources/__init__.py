"""Where samples come from: picture folders, WebDataset tars, tables."""

from __future__ import annotations

from datapipe.sources.fields import FieldMap
from datapipe.sources.folder import FolderSource
from datapipe.sources.opener import FORMATS, open_sources
from datapipe.sources.record import MISSING, Fault, Item, Note, Record, Source, TextRows
from datapipe.sources.table import TableSource
from datapipe.sources.text_rows import gathered
from datapipe.sources.webdataset import WebDatasetSource

__all__ = [
    "FORMATS",
    "MISSING",
    "Fault",
    "FieldMap",
    "FolderSource",
    "Item",
    "Note",
    "Record",
    "Source",
    "TableSource",
    "TextRows",
    "WebDatasetSource",
    "gathered",
    "open_sources",
]
