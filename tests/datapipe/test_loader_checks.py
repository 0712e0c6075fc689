"""What a loader is told wrongly is refused by name, before anything is read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from datapipe import ImageField, Loader, LoaderError, SampleError, StageOptions
from storage import FeatureStore, View
from tests.datapipe.test_loader import picture, png


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    store = FeatureStore.create(tmp_path_factory.mktemp("checks") / "store")
    store.append({"key": f"{index}", "blob": png(picture(index)), "caption": "x"} for index in range(6))
    return store.refresh().select()


def make(view: Any, **options: Any) -> Loader:
    return Loader(view, **{"batch_size": 2, "image": ImageField(size=(4, 6)), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2.5}, r"batch_size is 2\.5, wanted a whole number, 1 or more"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"num_threads": 1.5}, r"num_threads is 1\.5"),
        ({"seed": "a"}, "seed is 'a', wanted a whole number"),
        ({"columns": "caption"}, r"columns is 'caption', wanted a list of names"),
        ({"tensors": "codes"}, "tensors is 'codes'"),
        ({"image": (4, 6)}, r"image is \(4, 6\), wanted an ImageField"),
        ({"order": 3}, "order is 3, wanted an order"),
        ({"texts": {"caption": len}}, r"texts\['caption'\] is .*, wanted a TextField"),
        ({"fields": {"a": 3}}, r"fields\['a'\] is 3, wanted a field"),
        ({"stages": {"decode": 3}}, r"stages\['decode'\] is 3, wanted StageOptions"),
        ({"stages": [StageOptions()]}, "stages is .*, wanted a dictionary by name"),
    ],
)
def test_options_of_another_kind_are_refused(view: View, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        make(view, **options)


def test_a_store_is_no_view(view: View) -> None:
    with pytest.raises(LoaderError, match=r"view is FeatureStore.*store\.select\(\)"):
        make(view.store)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_views_of_less_than_a_batch(view: View, num_rows: int) -> None:
    with pytest.raises(LoaderError, match=f"out of {num_rows} rows"):
        make(view[:num_rows])
    if num_rows:
        assert [len(batch) for batch in make(view[:num_rows], drop_last=False)] == [1]
    shares = [[len(batch) for batch in share] for share in of_ranks(view[:3])]
    assert sorted(shares) == [[0]] * 5 + [[1]] * 3


def of_ranks(view: View) -> list[Loader]:
    return [make(view, batch_size=8, drop_last=False, rank=rank, world_size=8) for rank in range(8)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed": -2}, "consumed of the state is -2"),
        ({"consumed": 1000}, "1000, an epoch of this loader has 6 samples"),
        ({"consumed": 2.5}, r"consumed of the state is 2\.5"),
        ({"epoch": -1}, "epoch of the state is -1"),
        ({"version": 9}, "version is 9"),
    ],
)
def test_states_that_no_loader_saved_are_refused(view: View, change: dict[str, Any], message: str) -> None:
    loader = make(view)
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert sum(len(batch) for batch in loader) == 6


@pytest.mark.parametrize("state", [None, [], "x"])
def test_what_is_no_state_is_told(view: View, state: Any) -> None:
    with pytest.raises(LoaderError, match=r"wanted what state_dict\(\) gave"):
        make(view).load_state_dict(state)


@pytest.mark.parametrize("epoch", [-1, "a", 1.5])
def test_epochs_are_whole_numbers(view: View, epoch: Any) -> None:
    with pytest.raises(LoaderError, match="epoch is"):
        make(view).set_epoch(epoch)


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy])
def test_a_loader_says_how_to_send_it(view: View, send: Any) -> None:
    with pytest.raises(LoaderError, match="send its view"):
        send(make(view))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda image, generator: None, r"gave NoneType, wanted a tensor \(C, H, W\)"),
        (lambda image, generator: image.numpy(), "gave ndarray"),
        (lambda image, generator: image.reshape(-1), r"gave torch\.uint8\(72,\)"),
        (lambda image, generator: image.long(), r"gave torch\.int64\(3, 4, 6\)"),
    ],
)
def test_transforms_that_give_no_picture_are_told(view: View, transform: Any, message: str) -> None:
    image = ImageField(size=(4, 6), transforms=(transform,))
    with pytest.raises(SampleError, match=rf"sample '\d' \(row \d\): the transforms {message}"):
        next(iter(make(view, image=image)))
    lenient = {"transform": StageOptions(max_failures=6)}
    assert [len(batch) for batch in make(view, image=image, stages=lenient)] == [0, 0, 0]


def test_transforms_may_give_any_float(view: View) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        image = ImageField(size=(4, 6), transforms=(lambda image, generator, kind=dtype: image.to(kind),))
        images = next(iter(make(view, image=image))).images
        assert images is not None and images.dtype == torch.float32


class Gives:
    needs_blob = False
    columns: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self, raw: Any) -> np.ndarray:
        return self.value


@pytest.mark.parametrize("value", [None, "abc"])
def test_fields_that_give_no_numbers_are_told(view: View, value: Any) -> None:
    with pytest.raises(SampleError, match=r"the field 'a' gave .*, wanted an array of numbers"):
        next(iter(make(view, image=None, fields={"a": Gives(value)})))


def test_closing_twice_and_reading_on(view: View) -> None:
    loader = make(view)
    running = iter(loader)
    next(running)
    loader.close()
    loader.close()
    assert next(running, None) is None
    assert sum(len(batch) for batch in loader) == 6
