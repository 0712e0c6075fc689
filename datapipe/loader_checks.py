"""What a loader is told, checked before anything is read. Errors name the option and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from types import UnionType
from typing import Any, Final

from datapipe.batching import Buckets
from datapipe.errors import LoaderError
from datapipe.fields import ImageField, TextField
from datapipe.joined import JoinedView
from datapipe.stages import StageOptions
from storage import View

__all__ = ["check_batch", "check_kinds", "check_numbers", "check_state", "whole_number"]

_NAMES_WANTED: Final = "a list of names, such as ['caption']"


def whole_number(name: str, value: Any, lowest: int | None = None) -> int:
    """The value as an int.

    Raises:
        LoaderError: If it is no whole number, or below `lowest`.
    """
    if not isinstance(value, Integral) or (lowest is not None and value < lowest):
        wanted = "a whole number" if lowest is None else f"a whole number, {lowest} or more"
        raise LoaderError(f"{name} is {value!r}, wanted {wanted}")
    return int(value)


def check_kinds(
    *, view: Any, image: Any, order: Any, texts: Any, fields: Any, stages: Any, names: Mapping[str, Any]
) -> None:
    """Refuse values of another kind than the option is for; `names` are the lists of columns.

    Raises:
        LoaderError: Names the option.
    """
    _check_kind("view", view, View | JoinedView, "the rows of a store, such as store.select()")
    if image is not None:
        _check_kind("image", image, ImageField, "an ImageField or None")
    if order is not None and not hasattr(order, "positions"):
        raise LoaderError(f"order is {order!r}, wanted an order such as FullShuffle(), or None")
    for option, held in (("texts", texts), ("fields", fields), ("stages", stages)):
        if held is not None:
            _check_kind(option, held, Mapping, "a dictionary by name")
    for name, text in (texts or {}).items():
        _check_kind(f"texts[{name!r}]", text, TextField, "a TextField")
    for name, field in (fields or {}).items():
        if not hasattr(field, "read"):
            raise LoaderError(f"fields[{name!r}] is {field!r}, wanted a field such as VideoField(...)")
    for name, options in (stages or {}).items():
        _check_kind(f"stages[{name!r}]", options, StageOptions, "StageOptions(...)")
    for option, listed in names.items():
        if isinstance(listed, str):
            raise LoaderError(f"{option} is {listed!r}, wanted {_NAMES_WANTED}")


def check_batch(batch_size: int | None, buckets: Buckets | None, world_size: int) -> None:
    """Refuse a size and buckets at once, neither, or less than a row for each rank.

    Raises:
        LoaderError: With the numbers.
    """
    if (batch_size is None) == (buckets is None):
        raise LoaderError(f"batch_size is {batch_size} and buckets are {buckets}; give one of them")
    if buckets is not None and buckets.multiple_of < world_size:
        raise LoaderError(f"multiple_of {buckets.multiple_of} is less than the {world_size} ranks; raise it")
    if batch_size is not None and whole_number("batch_size", batch_size, 1) < world_size:
        raise LoaderError(f"batch_size {batch_size} is the global batch and less than the {world_size} ranks")


def check_numbers(*, rank: int, world_size: int, num_threads: int, prefetch_batches: int, seed: int) -> None:
    """Refuse numbers out of range.

    Raises:
        LoaderError: Names the option.
    """
    whole_number("world_size", world_size, 1)
    whole_number("num_threads", num_threads, 1)
    whole_number("prefetch_batches", prefetch_batches, 1)
    whole_number("seed", seed)
    if not 0 <= whole_number("rank", rank) < world_size:
        raise LoaderError(f"rank is {rank}, wanted 0..{world_size - 1}")


def check_state(state: Any, mine: Mapping[str, int], num_samples: int) -> None:
    """Refuse the state of other code, of other rows or another order, and places that no epoch has.

    Args:
        state: What was saved.
        mine: The state of the loader that is to go on.
        num_samples: Of one epoch.

    Raises:
        LoaderError: Names what differs, with both values.
    """
    if not isinstance(state, Mapping):
        raise LoaderError(f"the state is {state!r}, wanted what state_dict() gave")
    missing = [name for name in mine if name not in state]
    if missing or state["version"] != mine["version"]:
        raise LoaderError(
            f"this is no loader state of version {mine['version']}: version is {state.get('version')!r}, "
            f"missing {missing}; it was saved by other code"
        )
    for name in ("num_rows", "rows_hash", "seed", "shuffle"):
        if state[name] != mine[name]:
            raise LoaderError(
                f"the state was saved with {name} {state[name]!r}, this loader has {mine[name]!r}; open "
                f"the same snapshot with the same query and seed, or start anew without the state"
            )
    whole_number("epoch of the state", state["epoch"], 0)
    if whole_number("consumed of the state", state["consumed"], 0) > num_samples:
        raise LoaderError(
            f"consumed of the state is {state['consumed']}, an epoch of this loader has {num_samples} "
            f"samples; the state was changed after it was saved"
        )


def _check_kind(option: str, value: Any, kind: type | UnionType, wanted: str) -> None:
    if not isinstance(value, kind):
        raise LoaderError(f"{option} is {value!r}, wanted {wanted}")
