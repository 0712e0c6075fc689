"""The loader: exact order, exact resume, pixels, threads that end."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe import Batch, ImageField, Loader, LoaderError, SampleError
from datapipe.decode import decode_image
from datapipe.order import BlockShuffle, Order, ViewOrder
from datapipe.sampling import FixedLength, FullShuffle
from storage import FeatureStore, View


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def picture(index: int, height: int = 4, width: int = 6) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    store = FeatureStore.create(tmp_path_factory.mktemp("loader") / "store")
    for start in (0, 20):
        store.append(
            {
                "key": f"{index:03d}",
                "blob": png(picture(index)),
                "caption": f"text {index}",
                "number": index if index % 2 else None,
                "tensors": {"codes": np.full(3, index, np.int16)},
            }
            for index in range(start, start + 20)
        )
    return store.refresh().select()


@functools.cache
def text_view(num_rows: int) -> View:
    store = FeatureStore.create(Path(tempfile.mkdtemp()) / "store")
    store.append({"key": f"{index:05d}", "caption": "x"} for index in range(num_rows))
    return store.refresh().select()


def keys_of(batches: object) -> list[str]:
    return [key for batch in batches for key in batch.keys]  # type: ignore[attr-defined]


def test_a_batch_holds_what_the_store_holds(view: View) -> None:
    loader = Loader(
        view, batch_size=8, image=ImageField(size=(4, 6)), tensors=["codes"], columns=["caption", "number"]
    )
    for batch in loader:
        assert isinstance(batch, Batch) and len(batch) == 8
        assert batch.rows.dtype == np.int64 and batch.images is not None
        assert (batch.images.dtype, batch.images.shape) == (torch.float32, (8, 3, 4, 6))
        assert (batch.tensors["codes"].dtype, batch.tensors["codes"].shape) == (torch.int16, (8, 3))
        for position, key in enumerate(batch.keys):
            index = int(key)
            assert view.store.key(int(batch.rows[position])) == key
            assert batch.tensors["codes"][position].tolist() == [index] * 3
            assert batch.columns["caption"][position] == f"text {index}"
            assert batch.columns["number"][position] == (index if index % 2 else None)
            wanted = torch.from_numpy(picture(index)).permute(2, 0, 1).float() / 127.5 - 1
            torch.testing.assert_close(batch.images[position], wanted, atol=1e-6, rtol=0)


def test_keys_are_read_when_they_are_asked_for(view: View) -> None:
    (batch,) = Loader(view, batch_size=40, image=None, tensors=["codes"])
    assert "keys" not in vars(batch)
    wanted = [f"{codes[0]:03d}" for codes in batch.tensors["codes"].tolist()]
    batch.rows[:] = 0  # the caller's to write to
    copied = copy.copy(batch)
    assert batch.keys == copied.keys == wanted
    assert copied.read_keys() == wanted and copied.read_keys() is not batch.keys


def test_a_loader_does_without_pillow_until_a_picture_needs_it() -> None:
    code = "import sys, datapipe.loader; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {"PIL", "pandas", "duckdb"} & set(run.stdout.split()) == set()


def test_other_sizes_are_resized_antialiased(view: View) -> None:
    batch = next(iter(Loader(view[:4], batch_size=4, image=ImageField(size=(2, 2)), shuffle=False)))
    wanted = decode_image(png(picture(0)), size=(2, 2))
    found = ((batch.images[0].permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8).numpy()
    np.testing.assert_array_equal(found, wanted)
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(decode_image(png(stripes), size=(8, 8)).astype(int) - 127).max() <= 8


def test_batches_may_be_written_to(view: View) -> None:
    loader = Loader(view, batch_size=10, image=ImageField(size=(4, 6)), tensors=["codes"], shuffle=False)
    first = next(iter(loader))
    first.images.zero_()
    first.tensors["codes"].zero_()
    first.rows[:] = 0
    again = next(iter(loader))
    assert again.images.abs().sum() > 0 and again.tensors["codes"].sum() > 0 and again.rows[1] == 1


def test_consecutive_rows_are_not_copied(view: View) -> None:
    loader = Loader(view, batch_size=10, image=None, tensors=["codes"], columns=(), shuffle=False)
    before = view.store.counters.bytes_copied
    batches = list(loader)
    assert view.store.counters.bytes_copied == before
    assert [batch.tensors["codes"][:, 0].tolist() for batch in batches] == [
        list(range(start, start + 10)) for start in range(0, 40, 10)
    ]
    batches[0].tensors["codes"].zero_()
    assert next(iter(loader)).tensors["codes"][9, 0] == 9
    shuffled = Loader(view, batch_size=10, image=None, tensors=["codes"], columns=())
    assert len(list(shuffled)) == 4
    assert view.store.counters.bytes_copied == before + 40 * 3 * 2


def test_consecutive_rows_of_two_shards(view: View) -> None:
    loader = Loader(view, batch_size=16, image=None, tensors=["codes"], columns=(), shuffle=False)
    assert [batch.tensors["codes"][:, 2].tolist() for batch in loader] == [
        list(range(16)),
        list(range(16, 32)),
    ]


def test_no_pixels_when_none_are_asked_for(view: View) -> None:
    batch = next(iter(Loader(view, batch_size=4, image=None, columns=())))
    assert batch.images is None and batch.tensors == {} and batch.columns == {}


def test_a_view_has_its_own_order(view: View) -> None:
    picked = view[np.array([7, 3, 31])]
    batch = next(iter(Loader(picked, batch_size=3, image=None, shuffle=False)))
    assert batch.keys == ["007", "003", "031"] and batch.rows.tolist() == [7, 3, 31]


@given(
    num_rows=st.sampled_from([1, 5, 16, 37, 64]),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    order=st.sampled_from([ViewOrder(), BlockShuffle(), FullShuffle(), FixedLength(23)]),
)
@settings(max_examples=60, deadline=None)
def test_union_over_ranks_and_resumes_is_exactly_the_epoch(
    num_rows: int, batch_size: int, drop_last: bool, ranks: list[int], stops: list[int], order: Order
) -> None:
    length = order.num_samples(num_rows)
    if drop_last and length < batch_size:
        return
    view = text_view(num_rows)

    def make(rank: int, world_size: int) -> Loader:
        return Loader(
            view,
            batch_size=batch_size,
            image=None,
            columns=(),
            seed=5,
            order=order,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            num_threads=1 + rank % 2,
            prefetch_batches=1 + world_size,
        )

    whole = keys_of(make(0, 1))
    assert len(whole) == (length // batch_size * batch_size if drop_last else length)
    seen: list[str] = []
    state: dict[str, int] | None = None
    for world_size, stop in zip([*ranks, 1], [*stops[: len(ranks)], None]):
        world_size = min(world_size, batch_size)
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        running = [iter(loader) for loader in loaders]
        for _ in range(stop if stop is not None else len(whole) + 1):
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


@given(num_rows=st.integers(8, 64), batch_size=st.integers(4, 12), stops=st.tuples(*[st.integers(1, 3)] * 2))
@settings(max_examples=30, deadline=None)
def test_four_ranks_then_three_then_one_see_each_row_once(
    num_rows: int, batch_size: int, stops: tuple[int, int]
) -> None:
    view = text_view(num_rows)
    seen: list[str] = []
    state: dict[str, int] = {}
    for world_size, stop in ((4, stops[0]), (3, stops[1]), (1, num_rows)):
        loaders = [
            Loader(view, batch_size=batch_size, image=None, drop_last=False, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for shares in itertools.islice(zip(*loaders, strict=True), stop):
            seen += [key for share in shares for key in share.keys]
        state = loaders[0].state_dict()
        if state["epoch"] == 1:
            break
    assert sorted(seen) == view.keys()


def test_states_of_another_order_are_refused() -> None:
    view = text_view(16)
    state = Loader(view, batch_size=4, image=None, order=FullShuffle()).state_dict()
    Loader(view, batch_size=2, image=None, order=FullShuffle()).load_state_dict(state)
    with pytest.raises(LoaderError, match="saved with shuffle"):
        Loader(view, batch_size=4, image=None).load_state_dict(state)


def test_len_counts_batches(view: View) -> None:
    assert len(Loader(view, batch_size=16, image=None)) == 2
    assert len(Loader(view, batch_size=16, image=None, drop_last=False)) == 3


def test_an_early_break_starts_the_epoch_again(view: View) -> None:
    loader = Loader(view, batch_size=8, image=None)
    first = next(iter(loader)).keys
    for batch in loader:
        assert batch.keys == first
        break
    assert loader.epoch == 0
    assert keys_of(loader)[:8] == first
    assert loader.epoch == 1


def test_iterators_side_by_side_do_not_disturb_each_other(view: View) -> None:
    loader = Loader(view, batch_size=8, image=ImageField(size=(4, 6)))
    for left, right in zip(loader, loader):
        assert left.keys == right.keys
    one, two = iter(loader), iter(loader)
    alone = [batch.keys for batch in Loader(view, batch_size=8, image=None)]
    loader.set_epoch(0)
    one, two = iter(loader), iter(loader)
    mixed = [next(one).keys, next(one).keys, next(two).keys, next(one).keys, next(two).keys]
    assert mixed == [alone[0], alone[1], alone[0], alone[2], alone[1]]


def test_forever_goes_through_the_epochs(view: View) -> None:
    loader, wanted = (Loader(view, batch_size=8, image=None) for _ in range(2))
    epochs = [keys_of(wanted), keys_of(wanted)]
    batches = loader.forever()
    assert [key for _ in range(10) for key in next(batches).keys] == epochs[0] + epochs[1]
    resumed = Loader(view, batch_size=8, image=None)
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed.forever()).keys == next(batches).keys


def test_state_of_a_finished_epoch_goes_on_with_the_next(view: View) -> None:
    loader = Loader(view, batch_size=8, image=None)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    resumed = Loader(view, batch_size=8, image=None)
    resumed.load_state_dict(loader.state_dict())
    assert (list(resumed), resumed.epoch) == ([], 1)
    assert list(batches) == [] and loader.state_dict() == resumed.state_dict()
    assert keys_of(loader) == keys_of(resumed)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("datapipe")]


def test_dropped_and_closed_iterators_leave_no_thread(view: View) -> None:
    loader = Loader(view, batch_size=4, image=ImageField(size=(4, 6)), num_threads=3)
    for _ in loader:
        assert _threads()
        break
    gc.collect()
    assert not _threads()
    batches = loader.forever()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not _threads()
    try:
        for _ in loader:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    gc.collect()
    assert not _threads()


def test_a_sample_that_hangs_is_named(
    view: View, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(data: memoryview, **options: object) -> np.ndarray:
        pixels = decode_image(data, size=(4, 6))
        if np.array_equal(pixels, picture(2)):
            time.sleep(0.3)
        return pixels

    monkeypatch.setattr("datapipe.sample_stages.decode_image", slow)
    monkeypatch.setattr("datapipe.batch_job.STALL_S", 0.1)
    with caplog.at_level("WARNING", logger="unirl.datapipe"):
        next(iter(Loader(view[:4], batch_size=4, image=ImageField(size=(4, 6)), shuffle=False)))
    assert "stage 'decode', worker datapipe-decode-" in caplog.text
    assert "is at sample '002' for" in caplog.text


def test_prefetch_is_bounded(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counting(data: memoryview, **options: object) -> np.ndarray:
        decoded.append(1)
        return decode_image(data, size=(4, 6))

    monkeypatch.setattr("datapipe.sample_stages.decode_image", counting)
    batches = iter(Loader(view, batch_size=4, image=ImageField(size=(4, 6)), prefetch_batches=2))
    next(batches)
    time.sleep(0.1)
    assert len(decoded) <= 8 + 2  # and one piece of the batch after them


def test_a_sample_without_a_picture_is_named() -> None:
    with pytest.raises(SampleError, match=r"sample '0000\d' \(row \d\)"):
        next(iter(Loader(text_view(5), batch_size=5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 41}, "40 rows, not one batch of 41"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "num_threads": 0}, "num_threads is 0"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, r"rank is 2, wanted 0\.\.1"),
        ({"batch_size": 4, "columns": ["captoin"]}, "no column 'captoin'.*did you mean 'caption'"),
        ({"batch_size": 4, "tensors": ["code"]}, "no tensor column 'code'.*did you mean 'codes'"),
    ],
)
def test_what_cannot_start_says_why(view: View, options: dict[str, object], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        Loader(view, image=None, **options)  # type: ignore[arg-type]


def test_states_of_other_data_are_refused(view: View) -> None:
    state = Loader(view, batch_size=4, image=None).state_dict()
    assert json.loads(json.dumps(state)) == state
    for other, message in (
        (Loader(view[1:], batch_size=4, image=None), "num_rows 40, this loader has 39"),
        (Loader(view[::-1], batch_size=4, image=None), "rows_hash"),
        (Loader(view, batch_size=4, image=None, seed=1), "seed 0, this loader has 1"),
        (Loader(view, batch_size=4, image=None, shuffle=False), "shuffle"),
    ):
        with pytest.raises(LoaderError, match=message):
            other.load_state_dict(state)
    with pytest.raises(LoaderError, match="no loader state of version 2"):
        Loader(view, batch_size=4, image=None).load_state_dict({"epoch": 1})


def named_view(folder: Path, names: Sequence[str]) -> View:
    store = FeatureStore.create(folder)
    store.append({"key": name, "caption": "x"} for name in names)
    return store.refresh().select()


def test_a_state_of_another_store_is_refused(tmp_path: Path) -> None:
    """Its rows have the same numbers, and would be gone on with in silence."""
    names = [f"{index:03d}" for index in range(40)]
    state = Loader(named_view(tmp_path / "a", names), batch_size=4, image=None).state_dict()
    for number, others in enumerate(([f"other {name}" for name in names], [*names[1:], "040"])):
        loader = Loader(named_view(tmp_path / f"b{number}", others), batch_size=4, image=None)
        with pytest.raises(LoaderError, match=r"saved over other samples.*keys_hash.*or a copy of it"):
            loader.load_state_dict(state)


def test_a_state_is_gone_on_with_where_its_samples_are(tmp_path: Path) -> None:
    """In a copy, in a snapshot that has more rows, in one that was compacted, and if older code saved it."""
    names = [f"{index:03d}" for index in range(40)]
    view = named_view(tmp_path / "a", names)
    loader = Loader(view, batch_size=4, image=None)
    keys_of(itertools.islice(loader, 3))
    state = loader.state_dict()
    wanted = keys_of(loader_with(view, state))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    store = FeatureStore.open(tmp_path / "copy")
    assert keys_of(loader_with(store.select(), state)) == wanted
    store.append([{"key": "more", "caption": "y"}])
    assert keys_of(loader_with(store.refresh().select("caption = 'x'"), state)) == wanted
    store.refresh().compact()
    assert keys_of(loader_with(store.refresh().select("caption = 'x'"), state)) == wanted
    old = {name: value for name, value in state.items() if name != "keys_hash"}
    assert keys_of(loader_with(view, old)) == wanted


def test_a_state_is_saved_and_read_where_keys_are_damaged(tmp_path: Path) -> None:
    """A budget may leave the rows of that shard out, and the run goes on."""
    names = [f"{index:03d}" for index in range(40)]
    state = Loader(named_view(tmp_path / "a", names), batch_size=4, image=None).state_dict()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store = FeatureStore.open(tmp_path / "b")
    file = tmp_path / "b" / store.snapshot.parts[0].keys.path
    file.write_bytes(bytes([byte ^ 255 for byte in file.read_bytes()]))
    loader = Loader(store.select(), batch_size=4, image=None)
    loader.load_state_dict(state)
    assert loader.state_dict() == {**state, "keys_hash": 0}


def loader_with(view: View, state: dict[str, int]) -> Loader:
    loader = Loader(view, batch_size=4, image=None)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("resample", ["bilinear", "nearest"])
def test_the_filter_is_the_callers_choice(view: View, resample: str) -> None:
    image = ImageField(size=(3, 3), resample=resample)  # type: ignore[arg-type]
    (batch,) = Loader(view[:1], batch_size=1, image=image, shuffle=False)
    wanted = decode_image(view.store.blob(0), size=(3, 3), resample=resample)  # type: ignore[arg-type]
    assert batch.images is not None
    found = ((batch.images.numpy()[0] + 1) * 127.5).round().transpose(1, 2, 0)
    np.testing.assert_array_equal(found, wanted)
