"""What a loader is told, checked before anything is read. Errors name the option and what is wanted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from types import UnionType
from typing import Any, Final

from datapipe.batching import Batches, Buckets
from datapipe.errors import LoaderError
from datapipe.fields import ImageField, TextField
from datapipe.joined import JoinedView
from datapipe.stages import StageOptions
from datapipe.whole_numbers import whole_number
from storage import View

__all__ = [
    "check_batch",
    "check_between_batches",
    "check_kinds",
    "check_numbers",
    "check_state",
    "check_timeout",
]

_NAMES_WANTED: Final = "a list of names, such as ['caption']"


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
    if order is not None and (isinstance(order, type) or not hasattr(order, "positions")):
        raise LoaderError(f"order is {order!r}, wanted an order such as FullShuffle(), or None")
    for option, held in (("texts", texts), ("fields", fields), ("stages", stages)):
        if held is not None:
            _check_kind(option, held, Mapping, "a dictionary by name")
    for name, text in (texts or {}).items():
        _check_kind(f"texts[{name!r}]", text, TextField, "a TextField")
    for name, field in (fields or {}).items():
        missing = [part for part in ("read", "needs_blob", "columns", "tensors") if not hasattr(field, part)]
        if missing or isinstance(field, type):
            raise LoaderError(
                f"fields[{name!r}] is {field!r}, which lacks {missing or 'its arguments'}; wanted a "
                f"field such as VideoField(...)"
            )
    for name, options in (stages or {}).items():
        _check_kind(f"stages[{name!r}]", options, StageOptions, "StageOptions(...)")
        _check_options(name, options)
    for option, listed in names.items():
        is_listed = isinstance(listed, Collection) and not isinstance(listed, str)
        if not is_listed or not all(isinstance(name, str) for name in listed):
            raise LoaderError(f"{option} is {listed!r}, wanted {_NAMES_WANTED}")


def check_batch(batch_size: int | None, buckets: Buckets | None, world_size: int) -> None:
    """Refuse a size and buckets at once, neither, or less than a row for each rank.

    Raises:
        LoaderError: With the numbers.
    """
    if (batch_size is None) == (buckets is None):
        raise LoaderError(f"batch_size is {batch_size} and buckets are {buckets}; give one of them")
    if buckets is not None and (isinstance(buckets, type) or not hasattr(buckets, "batches")):
        raise LoaderError(f"buckets is {buckets!r}, wanted TokenBuckets(...), PixelBuckets(...) or None")
    if buckets is not None and buckets.multiple_of < world_size:
        raise LoaderError(f"multiple_of {buckets.multiple_of} is less than the {world_size} ranks; raise it")
    if batch_size is not None and whole_number("batch_size", batch_size, 1) < world_size:
        raise LoaderError(f"batch_size {batch_size} is the global batch and less than the {world_size} ranks")


def check_timeout(name: str, value: Any) -> None:
    """Refuse what is neither a number of seconds nor None.

    Raises:
        LoaderError: Names the option.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise LoaderError(f"{name} is {value!r}, wanted seconds, more than 0, or None for no limit")


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
    missing = [name for name in mine if name not in state and name != "keys_hash"]
    if missing or state["version"] != mine["version"]:
        raise LoaderError(
            f"this is no loader state of version {mine['version']}: version is {state.get('version')!r}, "
            f"missing {missing}; it was saved by other code"
        )
    for name in ("num_rows", "rows_hash", "seed", "shuffle"):
        if not isinstance(state[name], Integral) or state[name] != mine[name]:
            raise LoaderError(
                f"the state was saved with {name} {state[name]!r}, this loader has {mine[name]!r}; open "
                f"the same snapshot with the same query and seed, or start anew without the state"
            )
    saved, here = state.get("keys_hash", 0), mine["keys_hash"]
    if not isinstance(saved, Integral) or (saved and here and saved != here):
        raise LoaderError(
            f"the state was saved over other samples: the rows of this view have the same numbers and other "
            f"keys (keys_hash {saved!r}, here {here!r}); open the store that it was saved over, or a copy of "
            f"it, or start anew without the state"
        )
    whole_number("epoch of the state", state["epoch"], 0)
    if whole_number("consumed of the state", state["consumed"], 0) > num_samples:
        raise LoaderError(
            f"consumed of the state is {state['consumed']}, an epoch of this loader has {num_samples} "
            f"samples; the state was changed after it was saved"
        )


def check_between_batches(consumed: int, batches: Batches) -> None:
    """Refuse a place in the middle of a batch of buckets, whose first samples would come again.

    Raises:
        LoaderError: With the bounds of the batch.
    """
    if batches.count(consumed):
        begin, end = batches.bounds(consumed, 0)
        if begin != consumed:
            raise LoaderError(
                f"consumed of the state is {consumed}, in the middle of the batch of the samples {begin} to "
                f"{end - 1}; the state was changed after it was saved"
            )


def _check_kind(option: str, value: Any, kind: type | UnionType, wanted: str) -> None:
    if not isinstance(value, kind):
        raise LoaderError(f"{option} is {value!r}, wanted {wanted}")


def _check_options(stage: str, options: StageOptions) -> None:
    for name, least in (("concurrency", 0), ("queue_size", 1), ("max_failures", 0)):
        value = getattr(options, name)
        if value is not None or name == "max_failures":
            whole_number(f"stages[{stage!r}].{name}", value, least)
    check_timeout(f"stages[{stage!r}].timeout_s", options.timeout_s)
