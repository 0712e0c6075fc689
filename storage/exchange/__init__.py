"""Other formats: what a store writes as tars, Parquet or a `datasets` folder, it reads back equal."""

from __future__ import annotations

from storage.exchange.exporting import ExportReport, export_rows
from storage.exchange.importing import import_rows
from storage.exchange.record import FORMATS

__all__ = ["FORMATS", "ExportReport", "export_rows", "import_rows"]
