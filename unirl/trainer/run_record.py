"""A recipe as plain JSON values, for the record of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.trainer.recipe import Recipe
from unirl.trainer.stages import Stage

__all__ = ["recipe_defaults", "recipe_record"]


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """The recipe's settings as JSON values; data and scoring are named by their class and keep theirs."""
    fields: dict[str, Any] = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    for name in ("data", "scoring"):
        fields[name] = _named(fields[name])
    return {name: _json_value(value) for name, value in fields.items()}


def recipe_defaults(recipe: Recipe) -> dict[str, Any]:
    """The part of the record that would stand there without a choice; settings without a default are out."""
    found: dict[str, Any] = _defaults(recipe)
    return found


def _defaults(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_defaults(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    found = {}
    for field in dataclasses.fields(value):
        if field.default is not dataclasses.MISSING:
            found[field.name] = _json_value(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = _json_value(field.default_factory())
        else:
            found[field.name] = _defaults(getattr(value, field.name))
    return found


def _named(part: Any) -> dict[str, Any]:
    settings: dict[str, Any] = _json_value(part) if dataclasses.is_dataclass(part) else {}
    return {"class": type(part).__name__, **settings}


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, Stage) and value.scoring is not None:
            plain["scoring"] = _named(value.scoring)
        return plain
    if isinstance(value, (tuple, list)):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _json_value(item) for name, item in value.items()}
    return value
