"""Batches of sequences with a token budget: padding, balance of ranks, exact resume."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe import Loader, LoaderError
from datapipe.buckets import TokenBatches, TokenBuckets
from datapipe.order import BlockShuffle, Order, ViewOrder
from datapipe.sampling import FixedLength
from storage import FeatureStore, View


@functools.cache
def text_view(num_rows: int) -> View:
    store = FeatureStore.create(Path(tempfile.mkdtemp()) / "store")
    store.append({"key": f"{index:05d}", "caption": "x"} for index in range(num_rows))
    return store.refresh().select()


def long_tailed(num_rows: int, longest: int = 4096) -> np.ndarray:
    """Mostly around 245 tokens, 1 in 100 above 2,000."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, num_rows).astype(np.int64) + 1
    return np.minimum(lengths, longest)


def cut(buckets: TokenBuckets, *, epoch: int = 0, drop_last: bool = False) -> TokenBatches:
    num_rows = len(buckets.lengths)
    positions = BlockShuffle().positions(num_rows, seed=3, epoch=epoch)
    return buckets.batches(
        positions, num_rows=num_rows, num_samples=num_rows, seed=3, epoch=epoch, drop_last=drop_last
    )


def rows_of(batches: TokenBatches) -> list[np.ndarray]:
    return [batches.take(*batches.bounds(0, index)) for index in range(batches.count(0))]


@pytest.mark.parametrize("linear", [2048.0, 6144.0])
@pytest.mark.parametrize("budget", [32_768, 65_536, 131_072])
def test_ranks_are_balanced_and_hardly_pad(budget: int, linear: float) -> None:
    """Over the epoch, and in all steps but the few of rows that are alone with their length."""
    buckets = TokenBuckets(long_tailed(50_000), token_budget=budget, linear=linear)
    batches = cut(buckets, drop_last=True)
    for world_size in (2, 4, 8):
        balance = batches.balance(world_size)
        assert 1 <= balance.slowest_over_mean <= 1.03 and balance.even_fraction >= 0.985
        assert 0 <= balance.padding_fraction < 0.04
        assert balance.num_batches > 100


def test_a_row_that_is_alone_with_its_length_comes_last() -> None:
    lengths = np.array([100] * 64 + [400])
    buckets = TokenBuckets(lengths, token_budget=3200, multiple_of=8, linear=0)
    batches = cut(buckets)
    found = [buckets.lengths[rows].tolist() for rows in rows_of(batches)]
    assert found[:2] == [[100] * 32] * 2 and found[2:] == [[400]]
    balance = batches.balance(4)
    assert (balance.even_fraction, balance.worst_over_mean) == (pytest.approx(2 / 3), 4)


def test_balance_of_batches_known_by_hand() -> None:
    buckets = TokenBuckets([4, 4, 2, 1], token_budget=16, multiple_of=1, linear=0)
    batches = cut(buckets)  # one batch: 4 4 2 1, for two ranks as 4 4 | 2 1 or 4 | 4 2 1
    assert [buckets.lengths[rows].tolist() for rows in rows_of(batches)] == [[4, 4, 2, 1]]
    found = batches.balance(2)
    assert found.padding_fraction == pytest.approx(1 - 11 / 12)
    assert found.slowest_over_mean == found.worst_over_mean == pytest.approx(32 / 20)
    assert found.even_fraction == 0
    alone = batches.balance(1)
    assert (alone.padding_fraction, alone.slowest_over_mean) == (pytest.approx(1 - 11 / 16), 1)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=200),
    multiple_of=st.integers(1, 6),
    world_size=st.integers(1, 6),
    spare=st.integers(0, 300),
)
@settings(max_examples=80, deadline=None)
def test_batches_keep_the_budget_and_shares_cover_them(
    lengths: list[int], multiple_of: int, world_size: int, spare: int
) -> None:
    budget = max(lengths) * multiple_of + spare
    buckets = TokenBuckets(lengths, token_budget=budget, multiple_of=multiple_of)
    batches = cut(buckets)
    found = rows_of(batches)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    for rows in found[:-1]:
        assert len(rows) % multiple_of == 0
    for rows in found:
        assert len(rows) * buckets.lengths[rows].max() <= budget
        bounds = [batches.share(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert bounds[0][0] == 0 and bounds[-1][1] == len(rows)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
        assert sum(low < high for low, high in bounds) == min(world_size, len(rows))


def test_what_does_not_fill_a_batch_is_one_batch_of_the_epoch() -> None:
    buckets = TokenBuckets(long_tailed(40_000), token_budget=65_536)
    kept, dropped = rows_of(cut(buckets)), rows_of(cut(buckets, drop_last=True))
    assert len(kept) - len(dropped) in (0, 1)
    assert all((left == right).all() for left, right in zip(kept, dropped, strict=False))
    assert sum(map(len, dropped)) > 40_000 - 65_536 // 2


def test_epochs_differ_and_lengths_do_not_come_in_order() -> None:
    buckets = TokenBuckets(long_tailed(20_000), token_budget=65_536)
    first, again, second = (rows_of(cut(buckets, epoch=epoch)) for epoch in (0, 0, 1))
    assert all((left == right).all() for left, right in zip(first, again, strict=True))
    assert sorted(first[0].tolist()) != sorted(second[0].tolist())
    longest = np.array([buckets.lengths[rows[0]] for rows in first])
    assert 0.3 < (np.diff(longest) > 0).mean() < 0.7


@given(
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    drop_last=st.booleans(),
    order=st.sampled_from([BlockShuffle(), ViewOrder(), FixedLength(150)]),
)
@settings(max_examples=30, deadline=None)
def test_union_over_ranks_and_resumes_is_exactly_the_epoch(
    ranks: list[int], stops: list[int], drop_last: bool, order: Order
) -> None:
    lengths = long_tailed(100, longest=600)

    def make(rank: int, world_size: int) -> Loader:
        return Loader(
            text_view(100),
            buckets=TokenBuckets(lengths, token_budget=4800, multiple_of=4),
            image=None,
            columns=(),
            order=order,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )

    one = make(0, 1)
    assert len(one) == sum(1 for _ in one)
    one.set_epoch(0)
    whole = [key for batch in one for key in batch.keys]
    if not drop_last:
        assert len(whole) == order.num_samples(100)
    seen: list[str] = []
    state: dict[str, int] = {}
    for world_size, stop in zip([*ranks, 1], [*stops[: len(ranks)], 1000], strict=True):
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
        running = [iter(loader) for loader in loaders]
        for _ in range(stop):
            shares = [next(batches, None) for batches in running]
            assert len({share is None for share in shares}) == 1
            if shares[0] is None:
                break
            seen += [key for share in shares for key in share.keys]
        if loaders[0].epoch == 1:
            break
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == whole


def test_the_loader_reports_its_balance() -> None:
    buckets = TokenBuckets(long_tailed(100, longest=600), token_budget=4800, multiple_of=4)
    loader = Loader(text_view(100), buckets=buckets, image=None, world_size=2)
    balance = loader.balance()
    assert balance.num_batches == len(loader) and 0 < balance.padding_fraction < 0.5
    with pytest.raises(LoaderError, match="knows no lengths"):
        Loader(text_view(100), batch_size=4, image=None).balance()


def test_what_cannot_start_says_why() -> None:
    view = text_view(100)
    buckets = TokenBuckets([5] * 100, token_budget=40)
    state = Loader(view, buckets=buckets, image=None).state_dict()
    wider = TokenBuckets([5] * 100, token_budget=80)
    with pytest.raises(LoaderError, match="saved with shuffle"):
        Loader(view, buckets=wider, image=None).load_state_dict(state)
    with pytest.raises(LoaderError, match="give one of them"):
        Loader(view, buckets=buckets, batch_size=4, image=None)
    with pytest.raises(LoaderError, match="give one of them"):
        Loader(view, image=None)
    with pytest.raises(LoaderError, match="multiple_of 8 is less than the 9 ranks"):
        Loader(view, buckets=buckets, image=None, world_size=9)
    with pytest.raises(LoaderError, match="100 lengths for a view of 90 rows"):
        Loader(view[:90], buckets=buckets, image=None)
    with pytest.raises(LoaderError, match="row 1 of the view has 9 tokens, and 8 such rows"):
        TokenBuckets([3, 9, 4], token_budget=70)
    with pytest.raises(LoaderError, match=r"lengths of row 1 of the view are \[0\], wanted a list"):
        TokenBuckets([3, 0], token_budget=70)
    with pytest.raises(LoaderError, match=r"lengths of row 1 of the view are \[2\.5\], wanted"):
        TokenBuckets([3, 2.5], token_budget=70)
    with pytest.raises(LoaderError, match=r"token_budget is 70\.5, wanted a whole number"):
        TokenBuckets([3], token_budget=70.5)  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="linear is nan, wanted"):
        TokenBuckets([3], token_budget=70, linear=float("nan"))
    with pytest.raises(LoaderError, match="not one full batch"):
        Loader(view[:4], buckets=TokenBuckets([1] * 4, token_budget=64), image=None)


@pytest.mark.parametrize("linear", [-1, 1e308, float("nan"), None, "x"])
def test_a_linear_cost_is_a_number_of_tokens(linear: float) -> None:
    with pytest.raises(LoaderError, match="wanted a number of tokens, 0 to 1e"):
        TokenBuckets([5, 6], token_budget=100, linear=linear)
