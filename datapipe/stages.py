"""What a pipeline is: its stages, declared apart from running them, which `datapipe.pipeline` does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from datapipe.errors import StageError

__all__ = ["STALL_S", "Executor", "Pipeline", "Samples", "Stage", "StageOptions", "check_function_travels"]

STALL_S: Final = 60.0

Executor = Literal["thread", "process"]


class Samples(Protocol):
    """How a stage works on items that hold several samples: one after the other, each for itself.

    Then the function is from what `take` gives to what `put` takes. A sample that fails costs nothing else,
    is named by its own key, and `timeout_s` is that of one sample.
    """

    def indices(self, item: Any) -> Iterable[int]:
        """The samples of an item that are still to be worked on."""

    def key(self, item: Any, index: int) -> object:
        """What names the sample in messages."""

    def take(self, item: Any, index: int) -> Any:
        """What the function gets. It is sent to the process where there is one."""

    def put(self, item: Any, index: int, result: Any) -> None:
        """Keep what the function gave."""

    def drop(self, item: Any, index: int, error: Exception) -> None:
        """Note that `take`, the function or `put` failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """How a stage of a loader runs, where it is not to run as the loader would have it."""

    concurrency: int | None = None  # workers, see Stage; None: as the loader would have it
    queue_size: int | None = None  # items that may wait for the stage; None: all that are under way
    executor: Executor = "thread"
    max_failures: int = 0  # bad samples of an epoch that are left out; one more is an error with all of them
    timeout_s: float | None = None  # seconds that a sample may take; None: those of the loader


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of a pipeline: a function from an item to an item, and how it is run.

    With `executor="process"` the function and the items are sent to processes that are started afresh
    (`spawn`), for user Python that holds the interpreter's lock, leaks, or dies.
    """

    name: str
    function: Callable[[Any], Any]
    concurrency: int = 1  # workers, each at one item; 0: the worker of the stage before goes on with it
    queue_size: int = 2  # items that may wait for this stage; when they do, the stage before it waits
    executor: Executor = "thread"
    max_failures: int = 0  # failed items of a run that are left out; one more raises its error
    timeout_s: float | None = None  # seconds an item may take before that is an error; None waits
    samples: Samples | None = None  # how to take items apart; None gives whole items to the function

    def __post_init__(self) -> None:
        least_concurrency = 0 if self.executor == "thread" else 1
        for name, least in (("concurrency", least_concurrency), ("queue_size", 1), ("max_failures", 0)):
            value = getattr(self, name)
            if value < least:
                raise StageError(f"stage {self.name!r}: {name} is {value}, wanted {least} or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise StageError(
                f"stage {self.name!r}: timeout_s is {self.timeout_s}, wanted more than 0 or None"
            )
        if self.executor not in get_args(Executor):
            raise StageError(
                f"stage {self.name!r}: executor is {self.executor!r}, wanted one of "
                f"{', '.join(get_args(Executor))}"
            )
        if self.executor == "process":
            check_function_travels(self.name, self.function)

    def __str__(self) -> str:
        unit = "an item" if self.samples is None else "a sample"
        limit = "" if self.timeout_s is None else f", {self.timeout_s:g} s {unit} at most"
        workers = self.executor if self.concurrency == 1 else _PLURAL[self.executor]
        place = f"{self.concurrency} {workers}, queue of {self.queue_size}"
        if self.concurrency == 0:
            place = "in the worker of the stage before"
        return (
            f"{self.name}: {_function_name(self.function)}, {place}, "
            f"{self.max_failures} failures allowed{limit}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages that items go through one after the other. Printable; nothing runs before `run_pipeline`."""

    stages: tuple[Stage, ...]
    max_in_flight: int | None = None  # items drawn and not yet handed out; None: what workers and queues hold
    watchdog_s: float = STALL_S  # seconds without a result after which a warning names what is waited for

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) != len(names):
            raise StageError(f"the stages are named {names}, wanted one or more, each with its own name")
        if self.stages[0].concurrency == 0:
            raise StageError(f"stage {names[0]!r}: concurrency is 0, wanted 1 or more for the first stage")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise StageError(f"max_in_flight is {self.max_in_flight}, wanted 1 or more, or None")

    @property
    def capacity(self) -> int:
        """Most items that are drawn and not yet handed out."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        return sum(stage.concurrency + stage.queue_size for stage in self.stages if stage.concurrency)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stages), f"at most {self.capacity} items in flight"])


_PLURAL: Final[dict[Executor, str]] = {"thread": "threads", "process": "processes"}


def check_function_travels(stage_name: str, function: Callable[..., Any], part: str = "") -> None:
    """Refuse a function that a fresh process could not get.

    Args:
        stage_name: Where it is to run.
        function: Anything that can be called.
        part: What it is there, such as `transforms[1]`.

    Raises:
        StageError: Names the stage and the function.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = getattr(inner, "__module__", None)
    is_of_session = module == "__main__" and not Path(getattr(sys.modules[module], "__file__", "")).is_file()
    with ThreadPoolExecutor(1) as pool:  # its future holds whatever a user's __reduce__ raises
        error = pool.submit(ForkingPickler.dumps, function).exception()
    if error is None and not is_of_session:
        return
    reason = "it is defined in this session only" if error is None else f"it cannot be pickled: {error}"
    what = f"{part}, {_function_name(function)}," if part else _function_name(function)
    raise StageError(
        f"stage {stage_name!r}: {what} cannot be sent to a process, {reason}; define it at the top level of "
        f"a module that can be imported, or use executor='thread'"
    ) from error


def _function_name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _function_name(function.func)
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{qualified}"
