"""Mixtures and curricula: exact shares, passes of each source, caps, and resume."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe import Loader, LoaderError
from datapipe.mixture import Mixture, MixtureSource, curriculum
from datapipe.shares import Shares
from storage import FeatureStore, View


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    store = FeatureStore.create(tmp_path_factory.mktemp("mixture") / "store")
    store.append({"key": f"{index:03d}", "caption": "x", "level": index // 10} for index in range(60))
    return store.refresh()


def view(store: FeatureStore, first: int, size: int) -> View:
    return store.select()[first : first + size]


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=9),
    start=st.integers(0, 10**9),
    size=st.integers(0, 500),
)
@settings(max_examples=100, deadline=None)
def test_any_stretch_has_the_exact_shares(weights: list[int], start: int, size: int) -> None:
    shares = Shares(weights)
    counts = shares.counts(np.arange(start, start + size + 1))
    assert (counts.sum(axis=0) == np.arange(start, start + size + 1)).all()
    steps = np.diff(counts, axis=1)
    assert ((steps == 0) | (steps == 1)).all() and (steps.sum(axis=0) == 1).all()
    wanted = size * np.array(weights) / sum(weights)
    assert (np.abs(counts[:, -1] - counts[:, 0] - wanted) <= math.ceil(math.log2(len(weights)))).all()
    first = shares.first_with(0, 5)
    assert shares.counts(np.array([first - 1, first]))[0].tolist() == [4, 5]


def test_decimal_weights_are_exact() -> None:
    counts = Shares([0.7, 0.2, 0.1]).counts(np.arange(0, 1001, 10))
    np.testing.assert_array_equal(np.diff(counts[0]), 7)
    assert counts[:, -1].tolist() == [700, 200, 100]


def test_each_source_goes_through_its_rows_before_one_repeats(store: FeatureStore) -> None:
    mixture = Mixture(
        {
            "large": MixtureSource(view=view(store, 0, 40), weight=3),
            "small": MixtureSource(view=view(store, 40, 5), weight=1),
        },
        length=30,
    )
    taken = np.concatenate(
        [mixture.positions(45, seed=4, epoch=epoch).take(0, 30) for epoch in range(8)]
    )  # 240 samples: 180 of the large source in 4.5 passes, 60 of the small one in 12
    counts = np.bincount(taken, minlength=45)
    assert set(counts[40:].tolist()) == {12} and set(counts[:40].tolist()) == {4, 5}
    large = taken[taken < 40]
    assert all(sorted(large[at : at + 40]) == list(range(40)) for at in range(0, 160, 40))
    assert large[:40].tolist() != large[40:80].tolist()


def test_a_capped_source_leaves_its_share_to_the_others(store: FeatureStore) -> None:
    mixture = Mixture(
        {
            "rare": MixtureSource(view=view(store, 0, 4), max_passes=2),
            "rest": MixtureSource(view=view(store, 10, 50)),
        },
        length=100,
    )
    numbers, ordinals = mixture.deal(0, 100)
    assert Counter(numbers.tolist()) == {0: 8, 1: 92}
    assert set(numbers[:15].tolist()) == {0, 1} and set(numbers[16:].tolist()) == {1}
    for number in (0, 1):
        np.testing.assert_array_equal(ordinals[numbers == number], np.arange((numbers == number).sum()))


def test_a_curriculum_changes_the_queries_by_sample(store: FeatureStore) -> None:
    levels = {str(level): MixtureSource(view=store.select(f"level = {level}")) for level in range(3)}
    mixture = Mixture(levels, length=16, schedule={0: {"0": 1}, 20: {"0": 1, "1": 1}, 40: {"2": 1}})
    loader = Loader(mixture.view, order=mixture, batch_size=4, image=None, columns=["level"])
    batches = list(itertools.islice(loader.forever(), 12))
    found = [Counter(batch.columns["level"]) for batch in batches]
    assert found == [Counter({0: 4})] * 5 + [Counter({0: 2, 1: 2})] * 5 + [Counter({2: 4})] * 2
    assert len(loader) == 4 and loader.epoch == 2


def test_a_schedule_of_queries_is_a_curriculum(store: FeatureStore) -> None:
    queries = {0: "level = 0", 8: "level <= 1", 20: "level = 0", 24: "level = 2"}
    mixture = curriculum(store, queries, length=32)
    loader = Loader(mixture.view, order=mixture, batch_size=4, image=None, columns=["level"])
    batches = list(loader)
    levels = [set(batch.columns["level"]) for batch in batches]
    assert levels[:2] + levels[5:] == [{0}, {0}, {0}, {2}, {2}]
    assert set().union(*levels[2:5]) == {0, 1}
    easy = [key for batch in [*batches[:2], batches[5]] for key in batch.keys]
    assert sorted(easy[:10]) == [f"{index:03d}" for index in range(10)]
    with pytest.raises(LoaderError, match=r"start at \[4\]; one must hold from 0 on"):
        curriculum(store, {4: "level = 0"}, length=8)
    with pytest.raises(LoaderError, match="'level = 9' has 0 rows"):
        curriculum(store, {0: "level = 9"}, length=8)


@given(
    batch_size=st.integers(3, 12),
    ranks=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    stop=st.integers(1, 4),
)
@settings(max_examples=20, deadline=None)
def test_a_resume_goes_on_exactly(store: FeatureStore, batch_size: int, ranks: list[int], stop: int) -> None:
    def make(rank: int, world_size: int) -> Loader:
        sources = {
            "a": MixtureSource(view=view(store, 0, 7), weight=2, max_passes=3),
            "b": MixtureSource(view=view(store, 7, 11), weight=1.5),
            "c": MixtureSource(view=view(store, 5, 20), weight=0),
        }
        mixture = Mixture(sources, length=37, schedule={25: {"a": 1, "b": 1, "c": 2}})
        return Loader(
            mixture.view,
            order=mixture,
            batch_size=batch_size,
            image=None,
            drop_last=False,
            rank=rank,
            world_size=world_size,
        )

    wanted = [key for batch in itertools.islice(make(0, 1).forever(), stop * 3) for key in batch.keys]
    state: dict[str, int] = {}
    seen: list[str] = []
    for world_size in ranks:
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
        steps = zip(*(loader.forever() for loader in loaders), strict=True)
        for shares in itertools.islice(steps, stop):
            seen += [key for share in shares for key in share.keys]
        state = loaders[-1].state_dict()
    assert seen == wanted


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[FeatureStore]:
    """Two stores with the same keys; row r of store n has the codes 100 n + r."""
    made = []
    for number, size in enumerate((12, 20)):
        store = FeatureStore.create(tmp_path_factory.mktemp("several") / f"store-{number}")
        with store.writer(tensors={"codes": (np.uint8, (3,))}) as writer:
            for row in range(size):
                codes = np.full(3, row + 100 * number, np.uint8)
                extra = {"second": row} if number else {}
                writer.add(f"{row:03d}", None, {"codes": codes}, caption=f"store {number}", **extra)
        made.append(store.refresh())
    return made


def of_several(stores: list[FeatureStore]) -> Mixture:
    sources = {
        "one": MixtureSource(view=stores[0].select("row >= 2")),
        "two": MixtureSource(view=stores[1].select(), weight=3),
    }
    return Mixture(sources, length=16)


def test_views_of_several_stores(stores: list[FeatureStore]) -> None:
    mixture = of_several(stores)
    names = ["caption", "second", "row"]
    loader = Loader(mixture.view, order=mixture, batch_size=8, image=None, tensors=["codes"], columns=names)
    seen = [0, 0]
    for batch in itertools.islice(loader.forever(), 6):
        numbers, rows = (found.tolist() for found in mixture.view.locate(batch.rows))
        assert Counter(numbers) == {0: 2, 1: 6}
        assert batch.keys == [f"{row:03d}" for row in rows] and batch.columns["row"] == rows
        assert batch.columns["caption"] == [f"store {number}" for number in numbers]
        assert batch.columns["second"] == [row if number else None for number, row in zip(numbers, rows)]
        wanted = [[100 * number + row] * 3 for number, row in zip(numbers, rows)]
        assert batch.tensors["codes"].tolist() == wanted
        seen = [old + numbers.count(number) for number, old in enumerate(seen)]
    assert seen == [12, 36] and loader.stats().bytes_copied == 3 * loader.stats().samples
    with pytest.raises(LoaderError, match=r"no tensor column 'code'; it has \['codes'\]"):
        Loader(mixture.view, order=mixture, batch_size=8, image=None, tensors=["code"])


def test_several_stores_resume_exactly(stores: list[FeatureStore]) -> None:
    def make(rank: int, world_size: int) -> Loader:
        mixture = of_several(stores)
        return Loader(mixture.view, order=mixture, batch_size=4, image=None, rank=rank, world_size=world_size)

    loader = make(0, 1)
    wanted = [row for batch in itertools.islice(loader.forever(), 9) for row in batch.rows.tolist()]
    seen: list[int] = []
    state: dict[str, int] = {}
    for world_size in (2, 1, 3):
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
        steps = zip(*(loader.forever() for loader in loaders), strict=True)
        for shares in itertools.islice(steps, 3):
            seen += [row for share in shares for row in share.rows.tolist()]
        state = loaders[-1].state_dict()
    assert seen == wanted
    mixture = of_several(stores[::-1])
    with pytest.raises(LoaderError, match="saved with rows_hash"):
        Loader(mixture.view, order=mixture, batch_size=4, image=None).load_state_dict(
            {**state, "num_rows": len(mixture.view), "shuffle": mixture.fingerprint()}
        )


def test_a_state_of_other_weights_is_refused(store: FeatureStore) -> None:
    def make(weight: float) -> Loader:
        sources = {"a": MixtureSource(view=view(store, 0, 9), weight=weight)}
        mixture = Mixture({**sources, "b": MixtureSource(view=view(store, 9, 9))}, length=18)
        return Loader(mixture.view, order=mixture, batch_size=4, image=None)

    make(1.0).load_state_dict(make(1.0).state_dict())
    with pytest.raises(LoaderError, match="saved with shuffle"):
        make(1.5).load_state_dict(make(1.0).state_dict())


def test_what_is_no_mixture_says_why(store: FeatureStore, tmp_path: Path) -> None:
    some = MixtureSource(view=view(store, 0, 5))
    capped = MixtureSource(view=view(store, 0, 5), max_passes=1)
    other = FeatureStore.create(tmp_path / "other")
    other.append([{"key": "a", "level": "high"}])
    foreign = MixtureSource(view=other.refresh().select())
    with pytest.raises(LoaderError, match=r"sources of a mixture are \{\}, wanted one or more"):
        Mixture({}, length=5)
    with pytest.raises(
        LoaderError, match=r"column 'level' is VARCHAR in .*other, and BIGINT in a store before"
    ):
        Mixture({"a": some, "b": foreign}, length=5)
    with pytest.raises(LoaderError, match="'a' has 0 rows"):
        Mixture({"a": MixtureSource(view=view(store, 0, 0))}, length=5)
    with pytest.raises(LoaderError, match=r"unknown \['b'\]"):
        Mixture({"a": some}, length=5, schedule={3: {"b": 1}})
    with pytest.raises(LoaderError, match=r"not 0 or more \{.a.: -1\}"):
        Mixture({"a": some}, length=5, schedule={3: {"a": -1}})
    with pytest.raises(LoaderError, match="from sample 5 of the run on no source has rows left"):
        Mixture({"a": capped}, length=5)
    with pytest.raises(LoaderError, match=r"Loader\(mixture.view, order=mixture\)"):
        Loader(some.view[:4], order=Mixture({"a": some}, length=5), batch_size=2, image=None)
    with pytest.raises(LoaderError, match=r"source 'a' is \[1\], wanted MixtureSource"):
        Mixture({"a": [1]}, length=5)  # type: ignore[dict-item]
    with pytest.raises(LoaderError, match=r"not 0 or more \{.a.: nan\}"):
        Mixture({"a": MixtureSource(view=view(store, 0, 5), weight=float("nan"))}, length=5)
    with pytest.raises(LoaderError, match="a sample of the schedule is '3', wanted a whole number"):
        Mixture({"a": some}, length=5, schedule={"3": {"a": 1}})  # type: ignore[dict-item]
    with pytest.raises(LoaderError, match=r"max_passes of source 'a' is 1.5"):
        Mixture({"a": MixtureSource(view=view(store, 0, 5), max_passes=1.5)}, length=5)  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match=r"epoch \d+ of 5 samples ends beyond"):
        Mixture({"a": some}, length=5).positions(5, seed=0, epoch=2**40)
