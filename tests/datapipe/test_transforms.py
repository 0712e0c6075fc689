"""Transforms of pictures: numbers, and a stream that follows from (seed, epoch, key) alone."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from datapipe import ImageField, Loader, SampleError
from datapipe.errors import DataError, LoaderError
from datapipe.transforms import (
    CenterCrop,
    ColorJitter,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Transform,
    sample_generator,
)
from storage import FeatureStore, View


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: Resize(0), lambda: Resize((0, 5)), lambda: CenterCrop((5,)), lambda: RandomCrop((-1, 5))),
        lambda: RandomCrop((1.5, 5)),  # type: ignore[arg-type]
        *(lambda: RandomResizedCrop((8, 8), area=(0, 1)), lambda: RandomResizedCrop((8, 8), area=(1, 0.5))),
        *(lambda: RandomResizedCrop((8, 8), area=(1, 2)), lambda: RandomResizedCrop((8, 8), ratio=(0, 1))),
        *(lambda: HorizontalFlip(-0.1), lambda: HorizontalFlip(1.5), lambda: HorizontalFlip(float("nan"))),
        *(lambda: ColorJitter(brightness=-1), lambda: ColorJitter(contrast=float("inf"))),
        *(lambda: ColorJitter(hue=0.6), lambda: Normalize((0.5,), (0.0,)), lambda: Normalize((0.5,), (1, 1))),
        lambda: Normalize((float("nan"),), (1.0,)),
    ],
)
def test_options_that_make_no_picture_are_refused_at_once(make: Callable[[], Transform]) -> None:
    with pytest.raises(LoaderError, match=r"wanted|means"):
        make()


def test_a_picture_of_other_channels_is_not_normalized() -> None:
    with pytest.raises(DataError, match="Normalize is for 1 channels, the picture has 3"):
        Normalize((0.5,), (0.5,))(torch.zeros(3, 2, 2), generator())


def generator(key: str = "a") -> torch.Generator:
    return sample_generator(seed=1, epoch=0, key=key)


def picture(height: int = 6, width: int = 8) -> Tensor:
    numbers = np.random.default_rng(height * width).integers(0, 256, (3, height, width), dtype=np.uint8)
    return torch.from_numpy(numbers)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    store = FeatureStore.create(tmp_path_factory.mktemp("transforms") / "store")

    def blob(index: int) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(picture(12 + index % 3, 14).permute(1, 2, 0).numpy()).save(buffer, "PNG")
        return buffer.getvalue()

    store.append({"key": f"{index:02d}", "blob": blob(index), "caption": "x"} for index in range(24))
    return store.refresh().select()


def test_crops_are_parts_of_the_picture() -> None:
    image = picture()
    torch.testing.assert_close(CenterCrop((2, 4))(image, generator()), image[:, 2:4, 2:6])
    crops = {tuple(RandomCrop((3, 3))(image, generator(str(seed))).flatten().tolist()) for seed in range(60)}
    places = {tuple(image[:, y : y + 3, x : x + 3].flatten().tolist()) for y in range(4) for x in range(6)}
    assert crops <= places and len(crops) > 12
    with pytest.raises(DataError, match="6x8 is smaller than the crop of 7x8"):
        CenterCrop((7, 8))(image, generator())


def test_sizes() -> None:
    assert Resize((3, 5))(picture(), generator()).shape == (3, 3, 5)
    assert Resize(3)(picture(), generator()).shape == (3, 3, 4)
    assert RandomResizedCrop((4, 4))(picture(), generator()).shape == (3, 4, 4)
    flat = torch.full((3, 9, 9), 77, dtype=torch.uint8)
    assert bool((Resize((4, 5))(flat, generator()) == 77).all())
    assert Resize((4, 5))(flat.float() / 255, generator()).dtype == torch.float32


def test_flips_come_as_often_as_asked() -> None:
    image = picture()
    torch.testing.assert_close(HorizontalFlip(1.0)(image, generator()), image.flip(-1))
    torch.testing.assert_close(HorizontalFlip(0.0)(image, generator()), image)
    flipped = sum(not torch.equal(HorizontalFlip()(image, generator(str(n))), image) for n in range(200))
    assert 70 < flipped < 130


def test_colours() -> None:
    image = picture()
    same = ColorJitter()(image, generator())
    torch.testing.assert_close(same, image)
    grey = torch.full((3, 4, 4), 100, dtype=torch.uint8)
    turned = ColorJitter(saturation=0.9, hue=0.5, contrast=0.3)(grey, generator())
    assert int((turned.int() - 100).abs().max()) <= 1
    brighter = ColorJitter(brightness=0.5)(grey, generator())
    assert bool((brighter == brighter[0, 0, 0]).all()) and int(brighter[0, 0, 0]) != 100
    jittered = ColorJitter(0.4, 0.4, 0.4, 0.1)(image, generator())
    assert jittered.dtype == torch.uint8 and not torch.equal(jittered, image)


def test_normalising() -> None:
    image = torch.tensor([255, 0, 51], dtype=torch.uint8)[:, None, None]
    found = Normalize((0.5, 0.5, 0.0), (0.5, 0.25, 0.2))(image, generator())
    torch.testing.assert_close(found.flatten(), torch.tensor([1.0, -2.0, 1.0]))


def pixels_of(view: View, **options: object) -> dict[str, Tensor]:
    image = ImageField(
        size=None, transforms=(RandomResizedCrop((5, 6)), HorizontalFlip(), ColorJitter(0.2, 0.2, 0.2))
    )
    loader = Loader(view, batch_size=6, image=image, seed=4, **options)  # type: ignore[arg-type]
    return {
        key: pixels
        for batch in loader
        for key, pixels in zip(batch.keys, batch.images)  # type: ignore[arg-type]
    }


def test_the_stream_does_not_depend_on_threads_ranks_or_resumes(view: View) -> None:
    wanted = pixels_of(view)
    assert len(wanted) == 24 and len({tuple(pixels.flatten().tolist()) for pixels in wanted.values()}) == 24
    found = {}
    for rank in range(3):
        found.update(pixels_of(view, rank=rank, world_size=3, num_threads=1 + rank))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_every_epoch_draws_anew_and_a_resume_draws_the_same(view: View) -> None:
    image = ImageField(size=(12, 12), transforms=(RandomCrop((6, 6)), HorizontalFlip()))
    loader = Loader(view, batch_size=8, image=image)
    first, second = ([batch.images for batch in loader] for _ in range(2))
    assert not torch.equal(first[0], second[0])
    resumed = Loader(view, batch_size=8, image=image, num_threads=4)
    batches = iter(resumed)
    next(batches)
    again = Loader(view, batch_size=8, image=image, num_threads=1)
    again.load_state_dict(resumed.state_dict())
    assert all(torch.equal(found.images, wanted) for found, wanted in zip(again, first[1:]))


def test_a_callable_of_the_user_and_its_values(view: View) -> None:
    def half(image: Tensor, generator: torch.Generator) -> Tensor:
        return image.float() / 255 * 0.5

    plain = Loader(view, batch_size=4, image=ImageField(size=(4, 4)), shuffle=False)
    own: tuple[Transform, ...] = (half,)
    loader = Loader(view, batch_size=4, image=ImageField(size=(4, 4), transforms=own), shuffle=False)
    kept = Loader(
        view, batch_size=4, image=ImageField(size=(4, 4), transforms=(CenterCrop((4, 4)),)), shuffle=False
    )
    first, halved, same = (next(iter(one)).images for one in (plain, loader, kept))
    assert first is not None and halved is not None and same is not None
    torch.testing.assert_close(halved, (first + 1) / 4)
    torch.testing.assert_close(same, first)
    assert "transform: " in str(loader.pipeline) and "transform: " not in str(plain.pipeline)


def test_pictures_of_several_sizes_in_a_batch_are_told(view: View) -> None:
    with pytest.raises(
        SampleError, match=r"sample '\d\d' \(row \d+\): its images are .* give the field a size"
    ):
        list(Loader(view, batch_size=24, image=ImageField(size=None)))


def test_a_transform_that_exits_is_an_error(view: View) -> None:
    def leaving(image: Tensor, generator: torch.Generator) -> Tensor:
        raise SystemExit(3)

    loader = Loader(view, batch_size=4, image=ImageField(size=(4, 4), transforms=(leaving,)), shuffle=False)
    with pytest.raises(
        DataError, match=r"stage 'transform', sample '0\d': the function ended with SystemExit"
    ):
        next(iter(loader))
