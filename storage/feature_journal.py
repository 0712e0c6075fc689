"""The values that an `add_column` has computed so far, found again by a run with the same arguments."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType
from typing import TYPE_CHECKING, Any

import xxhash

from storage.backends.base import Workspace
from storage.errors import CommitConflictError, StorageError
from storage.feature_values import Values
from storage.value_log import ValueLog

if TYPE_CHECKING:
    from storage.features import ColumnRequest
    from storage.store import FeatureStore

__all__ = ["FeatureJournal", "open_journal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureJournal:
    """A log in a staging folder of its own."""

    log: ValueLog
    workspace: Workspace

    def close(self, *, keep: bool) -> None:
        """Give the folder up; with `keep` it stays for the next run if anything was computed."""
        self.log.close()
        if keep and len(self.log):
            self.workspace.leave()
        else:
            self.workspace.close()


def open_journal(store: FeatureStore, request: ColumnRequest, values: Values) -> FeatureJournal:
    """The journal of a request: that of a function goes on where it was, that of pairs is always new.

    Row numbers mean the same row in every snapshot, so values stay good when rows were added, deleted or
    compacted in between.

    Raises:
        CommitConflictError: If another run works on the same request.
    """
    identity = _identity(request, values)
    workspace = store.backend.reopen_workspace(f"column-{identity}")
    if workspace is None:
        raise CommitConflictError(
            f"{store.url}: another run computes tensor {request.name!r} at this moment (staging folder "
            f"column-{identity}); wait for it"
        )
    try:
        log = ValueLog(workspace.path / "values.log", request.spec)
    except StorageError:
        workspace.leave()
        raise
    return FeatureJournal(log=log, workspace=workspace)


def _identity(request: ColumnRequest, values: Values) -> str:
    model = request.spec.model
    text = json.dumps(
        [
            request.name,
            request.spec.dtype,
            request.spec.shape,
            None if model is None else [model.name, model.hash],
            request.sparse,
            _describe(values) if callable(values) else secrets.token_hex(16),
        ]
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def _describe(function: Callable[..., Any]) -> str:
    """The name and the code of a function, and the plain values that it is bound to or closes over.

    Objects, such as a model, are not looked into: model_hash is for them.
    """
    bound: list[object] = []
    while isinstance(function, functools.partial):
        bound += [*function.args, *function.keywords.values()]
        function = function.func
    bound += getattr(function, "__defaults__", None) or ()
    bound += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    plain = [repr(value) for value in bound if isinstance(value, str | bytes | int | float | None)]
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    named = function if hasattr(function, "__qualname__") else type(function)
    text = f"{named.__module__}.{named.__qualname__} {plain}"
    return text if code is None else f"{text} {_describe_code(code)}"


def _is_filled(cell: CellType) -> bool:
    """Whether a variable that a function closes over has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _describe_code(code: CodeType) -> str:
    constants = [
        _describe_code(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
