"""The optional packages that read videos, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from datapipe.errors import MissingExtraError

__all__ = ["import_av", "import_decord"]


def import_av() -> ModuleType:
    """Return PyAV.

    Raises:
        MissingExtraError: Naming the extra.
    """
    return _import("av", "PyAV")


def import_decord() -> ModuleType:
    """Return decord, which its maintained build `decord2` brings. Its log lines are switched off: what
    they say comes as errors and as counts.

    Raises:
        MissingExtraError: Naming the extra.
    """
    decord = _import("decord", "decord2")
    decord.logging.set_level(decord.logging.QUIET)
    return decord


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"reading videos needs {package} (module {module!r}), which cannot be imported: {error}; "
            f"install the extra with `pip install 'unirl[video]'`"
        ) from error
