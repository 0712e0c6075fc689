"""Two ranks as two threads of one process, on one store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unirl.errors import ConfigError, RankFailedError
from unirl.trainer import rank_failure
from unirl.trainer.preemption import StopAsked
from unirl.trainer.rank_failure import FailureWatch


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """The process group's store, where the environment says that it is."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(rank_failure, "blocks", itertools.repeat(0))
    yield store


def watch(rank: int, **options: Any) -> FailureWatch:
    accelerator: Any = SimpleNamespace(process_index=rank, num_processes=2)
    return FailureWatch(accelerator, **options)


def fail(rank: int, error: Exception, place: str = "") -> None:
    with watch(rank) as failures:
        if place:
            failures.at(place)
        raise error


def test_the_others_name_the_first_and_the_first_keeps_its_error(store: TCPStore) -> None:
    with pytest.raises(ValueError, match=r"^bad sample toy/07$"):
        fail(1, ValueError("bad sample toy/07"), "step 3, prompts toy/05, toy/07")
    with pytest.raises(RankFailedError) as caught:
        fail(0, RuntimeError("Connection closed by peer"), "step 3, prompts toy/01")
    assert str(caught.value) == (
        "rank 1 failed first, step 3, prompts toy/05, toy/07: ValueError: bad sample toy/07; "
        "rank 0 ended because of it"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_that_all_ranks_find_is_its_own_cause(store: TCPStore) -> None:
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"^prompts_per_step is wrong$"):
            fail(rank, ConfigError("prompts_per_step is wrong"), f"rank {rank}")


def test_a_request_to_stop_and_a_good_end_are_no_failures(store: TCPStore) -> None:
    with watch(1):
        pass
    with pytest.raises(StopAsked):
        fail(1, StopAsked("state saved"))
    with pytest.raises(ValueError, match="late"):
        fail(0, ValueError("late"))


def test_fsdp_09_a_rank_that_keeps_waiting_is_ended(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a collective that the failed rank never joins."""
    ended: list[int] = []
    released = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        released.set()

    monkeypatch.setattr("os._exit", end)
    with pytest.raises(ValueError):
        fail(1, ValueError("bad sample"), "step 3")
    with watch(0, grace_s=0.0):
        assert released.wait(timeout=30)
    assert ended == [1]
    assert "rank 1 failed first, step 3: ValueError: bad sample; rank 0 was still waiting" in caplog.text


@pytest.mark.parametrize(
    "alone",
    [
        lambda patch: SimpleNamespace(process_index=0, num_processes=1),
        lambda patch: patch.delenv("MASTER_ADDR") or SimpleNamespace(process_index=0, num_processes=2),
    ],
    ids=["one rank", "no address"],
)
def test_where_nobody_can_be_told_errors_pass(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, alone: Callable[[pytest.MonkeyPatch], Any]
) -> None:
    with pytest.raises(ValueError, match="own"), FailureWatch(alone(monkeypatch)):
        raise ValueError("own")
