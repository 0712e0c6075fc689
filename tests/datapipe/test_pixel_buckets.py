"""Aspect-ratio buckets: sizes, pixel budget, one size a batch, every picture once."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe import ImageField, Loader, LoaderError
from datapipe.order import BlockShuffle
from datapipe.pixel_buckets import PixelBuckets, bucket_sizes
from storage import FeatureStore, View

SIZES = [(40, 20), (20, 40), (30, 30), (24, 36), (36, 24)]


def png(index: int) -> bytes:
    height, width = SIZES[index % len(SIZES)]
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (index, 255 - index, 7)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    store = FeatureStore.create(tmp_path_factory.mktemp("pixels") / "store")
    store.append({"key": f"{index:03d}", "blob": png(index), "caption": "x"} for index in range(60))
    return store.refresh().select()


def buckets_of(num_rows: int) -> PixelBuckets:
    sizes = [SIZES[index % len(SIZES)] for index in range(num_rows)]
    return PixelBuckets(sizes, image_pixels=1024, pixel_budget=8192, multiple_of=4, side_multiple=8)


def test_sizes_of_buckets_are_near_the_pixel_count() -> None:
    sizes = bucket_sizes(512 * 512, side_multiple=64, max_aspect=2.0)
    assert (512, 512) in sizes and (384, 640) in sizes and (640, 384) in sizes
    for height, width in sizes:
        assert height % 64 == width % 64 == 0 and 0.5 <= height / width <= 2
        assert 0.8 * 512 * 512 <= height * width <= 512 * 512


@pytest.mark.parametrize(("pixels", "side", "aspect"), [(4096, 1, 2.0), (4096, 32, 7.5), (300_000, 16, 1.0)])
def test_no_size_is_missing(pixels: int, side: int, aspect: float) -> None:
    wanted = []
    for height in range(side, pixels // side + 1, side):
        width = pixels // height // side * side
        if width and max(height / width, width / height) <= aspect:
            wanted.append((height, width))
    assert bucket_sizes(pixels, side_multiple=side, max_aspect=aspect) == wanted


def test_a_picture_goes_to_the_nearest_aspect_ratio() -> None:
    buckets = PixelBuckets(
        [(512, 512), (100, 150), (1500, 1000), (10, 1000)],
        image_pixels=512 * 512,
        pixel_budget=8 * 512 * 512,
        side_multiple=64,
    )
    found = [buckets.sizes[bucket] for bucket in buckets.buckets.tolist()]
    assert found[0] == (512, 512)
    assert found[3] == max(buckets.sizes, key=lambda size: size[1] / size[0])
    assert abs(found[1][1] / found[1][0] - 1.5) < 0.2 and abs(found[2][0] / found[2][1] - 1.5) < 0.2
    square = PixelBuckets([(64, 64)], image_pixels=4096, pixel_budget=4096 * 8)
    assert square.mean_stretch == 1.0


@given(num_rows=st.integers(1, 200), epoch=st.integers(0, 3), drop_last=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_picture_comes_once_in_batches_of_one_bucket(
    num_rows: int, epoch: int, drop_last: bool
) -> None:
    buckets = buckets_of(num_rows)
    batches = buckets.batches(
        BlockShuffle().positions(num_rows, seed=1, epoch=epoch),
        num_rows=num_rows,
        num_samples=num_rows,
        seed=1,
        epoch=epoch,
        drop_last=drop_last,
    )
    found = [batches.take(*batches.bounds(0, index)) for index in range(batches.count(0))]
    seen = np.concatenate([np.empty(0, np.int64), *found])
    assert len(set(seen.tolist())) == len(seen)
    assert drop_last or len(seen) == num_rows
    for rows in found:
        assert len(set(buckets.buckets[rows].tolist())) == 1
        height, width = buckets.sizes[buckets.buckets[rows[0]]]
        assert batches.image_size(rows) == (height, width)
        assert len(rows) * height * width <= 8192
        assert not drop_last or len(rows) % 4 == 0


def test_batches_of_ranks_have_the_size_of_their_bucket(view: View) -> None:
    buckets = buckets_of(60)
    ranks = [
        Loader(
            view,
            buckets=buckets,
            image=ImageField(size=(8, 8)),
            columns=(),
            drop_last=False,
            rank=rank,
            world_size=2,
        )
        for rank in range(2)
    ]
    seen: list[str] = []
    shapes = set()
    for left, right in zip(*ranks, strict=True):
        assert left.images is not None and right.images is not None
        assert left.images.shape[1:] == right.images.shape[1:]
        for batch in (left, right):
            for key, image in zip(batch.keys, batch.images, strict=True):
                index = int(key)
                assert tuple(image.shape[1:]) == buckets.sizes[buckets.buckets[index]]
                assert image[0].mean().item() == pytest.approx(index / 127.5 - 1, abs=1e-4)
            seen += batch.keys
        shapes.add(tuple(left.images.shape[2:]))
    assert sorted(seen) == view.keys() and len(shapes) > 2


def test_a_resume_goes_on_exactly(view: View) -> None:
    def make() -> Loader:
        return Loader(view, buckets=buckets_of(60), image=None, columns=(), drop_last=False)

    whole = [batch.keys for batch in make()]
    loader = make()
    batches = iter(loader)
    seen = [next(batches).keys for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert seen + [batch.keys for batch in resumed] == whole


def test_what_are_no_buckets_says_why(view: View) -> None:
    with pytest.raises(LoaderError, match="sizes are int64 of shape"):
        PixelBuckets([3, 4], image_pixels=64, pixel_budget=640)
    with pytest.raises(
        LoaderError, match=r"sizes of row 1 of the view are \[None, 4\], wanted a height and a width"
    ):
        PixelBuckets([(3, 4), (None, 4)], image_pixels=64, pixel_budget=640)
    with pytest.raises(LoaderError, match="8 pictures of 1024 pixels are more than pixel_budget 1024"):
        PixelBuckets([(3, 4)], image_pixels=1024, pixel_budget=1024)
    with pytest.raises(LoaderError, match="no size with sides of multiples of 64"):
        bucket_sizes(1024, side_multiple=64, max_aspect=2)
    with pytest.raises(LoaderError, match=r"max_aspect is 0\.5, wanted a number of 1 or more"):
        bucket_sizes(1024, side_multiple=64, max_aspect=0.5)
    with pytest.raises(LoaderError, match="image_pixels is 1000000000000, wanted 4294967296 or fewer"):
        bucket_sizes(10**12, side_multiple=1, max_aspect=2)
    with pytest.raises(LoaderError, match="50 sizes for a view of 60 rows"):
        Loader(view, buckets=buckets_of(50), image=None)
