"""Settings by name: `text.steps=20` changes one field of a recipe, or says what the field is called."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from unirl.errors import ConfigError

__all__ = ["nearest", "replace_settings"]

T = TypeVar("T")


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the closest of the known names, or a list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def replace_settings(config: T, assignments: Sequence[str]) -> T:
    """Return a copy of a dataclass with fields replaced.

    Args:
        config: A frozen dataclass; fields may be dataclasses, or tuples of dataclasses with a `name`, which
            are addressed by that name.
        assignments: `path=value`, for example `text.steps=20`, `sft.config.width=64`, `settings.seed=3`.

    Raises:
        ConfigError: With every assignment that does not fit, not only the first.
    """
    wrong: list[str] = []
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            wrong.append(f"{assignment!r} is no setting; write path=value, such as text.steps=20")
            continue
        try:
            config = _replace(config, path.strip().split("."), value.strip(), path)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return config


def _replace(config: T, path: Sequence[str], value: str, whole: str) -> T:
    name, rest = path[0], path[1:]
    children = _children(config)
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if name in children and rest:
        owner, position = children[name]
        changed = _replace(_child(config, owner, position), rest, value, whole)
        if position is None:
            return dataclasses.replace(config, **{owner: changed})  # type: ignore[type-var]
        items = list(getattr(config, owner))
        items[position] = changed
        return dataclasses.replace(config, **{owner: tuple(items)})  # type: ignore[type-var]
    if name not in fields or rest:
        raise ConfigError(f"{whole}: there is no setting {name!r}{nearest(name, {*fields, *children})}")
    hint = typing.get_type_hints(type(config))[name]
    return dataclasses.replace(config, **{name: _parse(value, hint, whole)})  # type: ignore[type-var]


def _children(config: Any) -> dict[str, tuple[str, int | None]]:
    """Names of nested dataclasses -> (field, position in a tuple or None)."""
    found: dict[str, tuple[str, int | None]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found[field.name] = (field.name, None)
        elif isinstance(value, tuple):
            found |= {
                item.name: (field.name, i)
                for i, item in enumerate(value)
                if dataclasses.is_dataclass(item) and hasattr(item, "name")
            }
    return found


def _child(config: Any, owner: str, position: int | None) -> Any:
    value = getattr(config, owner)
    return value if position is None else value[position]


def _parse(value: str, hint: Any, whole: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value.lower() == "none" and type(None) in typing.get_args(hint):
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint in (int, float, str):
        try:
            return hint(value)
        except ValueError:
            pass
    elif typing.get_origin(hint) is typing.Literal and value in typing.get_args(hint):
        return value
    elif typing.get_origin(hint) is tuple:
        return tuple(_parse(part, typing.get_args(hint)[0], whole) for part in value.split(","))
    wanted = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{whole}: found {value!r}, wanted {wanted}")
