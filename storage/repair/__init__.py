"""Getting a damaged store back to use: what is whole stays, what is lost is listed, nothing is deleted."""

from __future__ import annotations

from storage.repair.repairing import repair_store
from storage.repair.report import LostRow, RepairReport

__all__ = ["LostRow", "RepairReport", "repair_store"]
