"""Settings by name: `text.steps=20` changes one field of a recipe, or says what the field is called."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from unirl.errors import ConfigError

__all__ = ["nearest", "replace_settings", "require_positive"]

T = TypeVar("T")

WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the closest of the known names, or a list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def require_positive(config: Any) -> None:
    """Refuse sizes below 1 in the whole-number fields of a dataclass, and in its tuples of them, all at once.

    Raises:
        ConfigError: With each field that is 0 or less.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    wrong = [
        f"{name} is {value}"
        for name, value in values.items()
        if any(isinstance(n, int) and n < 1 for n in (value if isinstance(value, tuple) else (value,)))
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}; wanted 1 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    whole: str
    """The path as it was written, for messages."""
    path: tuple[str, ...]
    """What is left of it."""
    value: str


def replace_settings(config: T, assignments: Sequence[str]) -> T:
    """Return a copy of a dataclass with fields replaced.

    All values are put in before a dataclass checks itself, so settings that only fit together can be
    changed together. The last of two values for one field counts.

    Args:
        config: A frozen dataclass; fields may be dataclasses, or tuples of dataclasses with a `name`, which
            are addressed by that name.
        assignments: `path=value`, for example `text.steps=20`, `sft.config.width=64`, `settings.seed=3`.

    Raises:
        ConfigError: With every assignment that does not fit, not only the first.
    """
    wrong: list[str] = []
    parsed: list[_Assignment] = []
    for assignment in assignments:
        path, equals, value = (part.strip() for part in assignment.partition("="))
        if equals and path:
            parsed.append(_Assignment(whole=path, path=tuple(path.split(".")), value=value))
        else:
            wrong.append(f"{assignment!r} is no setting; write path=value, such as text.steps=20")
    changed = _replace(config, parsed, "", wrong)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return changed


def _replace(config: T, assignments: Sequence[_Assignment], place: str, wrong: list[str]) -> T:
    """Apply all assignments to one dataclass; what does not fit is added to `wrong`."""
    if not assignments:
        return config
    children = _children(config)
    by_name: dict[str, list[_Assignment]] = {}
    for assignment in assignments:
        by_name.setdefault(assignment.path[0], []).append(assignment)
    values: dict[str, Any] = {}
    for name, group in by_name.items():
        deeper = [dataclasses.replace(a, path=a.path[1:]) for a in group if len(a.path) > 1]
        if name in children and len(deeper) == len(group):
            owner, position = children[name]
            before = values.get(owner, getattr(config, owner))
            where = f"{place}.{name}" if place else name
            if position is None:
                values[owner] = _replace(before, deeper, where, wrong)
            else:
                item = _replace(before[position], deeper, where, wrong)
                values[owner] = (*before[:position], item, *before[position + 1 :])
            continue
        for assignment in group:
            try:
                values[name] = _value(config, children, assignment)
            except ConfigError as error:
                wrong.append(f"{assignment.whole}: {error}")
    try:
        return dataclasses.replace(config, **values)  # type: ignore[type-var]
    except ConfigError as error:
        wrong.append(f"{place}: {error}" if place else str(error))
        return config


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


def _paths_to(config: Any, name: str) -> list[str]:
    """Dotted paths, below this level, of the settings of that name."""
    found = []
    for child, (owner, position) in _children(config).items():
        part = getattr(config, owner) if position is None else getattr(config, owner)[position]
        if name in {field.name for field in dataclasses.fields(part)}:
            found.append(f"{child}.{name}")
        found += [f"{child}.{path}" for path in _paths_to(part, name)]
    return found


def _value(config: Any, children: dict[str, tuple[str, int | None]], assignment: _Assignment) -> Any:
    """The new value of a plain field."""
    name, is_whole = assignment.path[0], len(assignment.path) == 1
    fields = {field.name for field in dataclasses.fields(config)}
    if name not in fields | children.keys():
        deeper = _paths_to(config, name)
        hint = f"; did you mean {' or '.join(deeper)}?" if deeper else nearest(name, fields | children.keys())
        raise ConfigError(f"there is no setting {name!r}{hint}")
    if not is_whole:
        raise ConfigError(f"{name!r} has no settings of its own; write {name}=value")
    if name in children:
        owner, position = children[name]
        part = getattr(config, owner) if position is None else getattr(config, owner)[position]
        raise ConfigError(
            f"{name!r} cannot be set as a whole; set one of its own: "
            f"{', '.join(sorted(field.name for field in dataclasses.fields(part)))}"
        )
    inside = sorted(child for child, (owner, _) in children.items() if owner == name)
    if inside:
        raise ConfigError(f"{name!r} cannot be set as a whole; set a part of it by name: {', '.join(inside)}")
    return _parse(assignment.value, typing.get_type_hints(type(config))[name])


def _parse(value: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _parse_union(value, typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return tuple(_parse(part.strip(), typing.get_args(hint)[0]) for part in value.split(","))
    if typing.get_origin(hint) is typing.Literal:
        return _parse_choice(value, typing.get_args(hint))
    if hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint in (int, float, str):
        try:
            number = hint(value)
        except ValueError:
            pass
        else:
            if hint is not float or math.isfinite(number):
                return number
    raise ConfigError(f"found {value!r}, wanted {WANTED.get(hint, getattr(hint, '__name__', str(hint)))}")


def _parse_union(value: str, members: Sequence[Any]) -> Any:
    """Read a value of one kind or none, or one out of several lists of choices."""
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) == len(members) and all(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return _parse_choice(value, [choice for kind in kinds for choice in typing.get_args(kind)])
    if value.lower() == "none":
        return None
    try:
        return _parse(value, kinds[0])
    except ConfigError as error:
        raise ConfigError(f"{error} or none") from None


def _parse_choice(value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(f"found {value!r}, wanted {' or '.join(choices)}")
    return value
