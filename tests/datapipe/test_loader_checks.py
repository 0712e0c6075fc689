"""What a loader is told wrongly is refused by name, before anything is read."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from datapipe import (
    DataError,
    FullShuffle,
    ImageField,
    Loader,
    LoaderError,
    SampleError,
    StageOptions,
    TextField,
    TokenBuckets,
)
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
        ({"fields": {"a": 3}}, r"fields\['a'\] is 3, which lacks .*; wanted a field"),
        ({"stages": {"decode": 3}}, r"stages\['decode'\] is 3, wanted StageOptions"),
        ({"stages": [StageOptions()]}, "stages is .*, wanted a dictionary by name"),
        ({"stages": {"decode": StageOptions(queue_size=0)}}, r"stages\['decode'\].queue_size is 0"),
        (
            {"stages": {"decode": StageOptions(timeout_s=0)}},
            r"stages\['decode'\].timeout_s is 0, wanted seconds",
        ),
        ({"stages": {"decode": StageOptions(concurrency=1.5)}}, r"\['decode'\].concurrency is 1.5"),
        ({"stages": {"decode": StageOptions(max_failures="3")}}, r"\['decode'\].max_failures is '3'"),
        ({"timeout_s": math.nan}, "timeout_s is nan, wanted seconds"),
        ({"timeout_s": math.inf}, "timeout_s is inf, wanted seconds"),
        ({"timeout_s": "5"}, "timeout_s is '5', wanted seconds"),
        ({"batch_size": True}, "batch_size is True, wanted a whole number"),
        ({"columns": [3]}, r"columns is \[3\], wanted a list of names"),
        ({"tensors": None}, "tensors is None, wanted a list of names"),
        ({"order": FullShuffle}, "order is <class.*, wanted an order such as"),
        ({"batch_size": None, "buckets": 3}, "buckets is 3, wanted TokenBuckets"),
        ({"fields": {"a": "read"}}, r"fields\['a'\] is 'read', which lacks \['read'"),
        ({"device": "gpu"}, "device is 'gpu', wanted 'cuda'"),
    ],
)
def test_options_of_another_kind_are_refused(view: View, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        make(view, **options)


@pytest.mark.parametrize(
    ("field", "options", "message"),
    [
        (ImageField, {"size": 4}, r"size is 4, wanted \(height, width\)"),
        (
            ImageField,
            {"size": (0, 4)},
            r"size is \(0, 4\): one of its numbers is 0, wanted a whole number, 1",
        ),
        (ImageField, {"size": (4.5, 4)}, r"one of its numbers is 4.5"),
        (ImageField, {"size": None, "pixels": "float16"}, "pixels is 'float16', wanted 'float32' or 'uint8'"),
        (ImageField, {"size": None, "resample": "cubic"}, "resample is 'cubic', wanted one of"),
        (ImageField, {"size": None, "max_pixels": -1}, "max_pixels is -1"),
        (
            ImageField,
            {"size": None, "background": (1, 2)},
            r"background is \(1, 2\), wanted red, green and blue",
        ),
        (
            ImageField,
            {"size": None, "transforms": (3,)},
            r"transforms is \(3,\), wanted a tuple of functions",
        ),
        (TextField, {"tokenizer": 3}, "tokenizer is 3, wanted a function"),
        (TextField, {"tokenizer": len, "pad_id": None}, "pad_id is None, wanted a whole number"),
        (TextField, {"tokenizer": len, "max_tokens": 0}, "max_tokens is 0, wanted a whole number, 1 or more"),
    ],
)
def test_fields_of_another_kind_are_refused(field: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        field(**options)


@pytest.mark.parametrize("option", ["seed", "batch_size", "rank", "world_size"])
def test_numbers_of_numpy_are_taken_and_saved_as_plain_ones(view: View, option: str) -> None:
    usual = {"seed": 3, "batch_size": 2, "rank": 0, "world_size": 1}
    loader, wanted = make(view, **{**usual, option: np.int64(usual[option])}), make(view, **usual)
    batches, theirs = iter(loader), iter(wanted)
    assert next(batches).keys == next(theirs).keys
    assert json.dumps(loader.state_dict()) == json.dumps(wanted.state_dict())


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
        ({"consumed": True}, "consumed of the state is True"),
        ({"seed": [0, 1]}, r"saved with seed \[0, 1\], this loader has 0"),
        ({"epoch": -1}, "epoch of the state is -1"),
        ({"version": 9}, "version is 9"),
    ],
)
def test_states_that_no_loader_saved_are_refused(view: View, change: dict[str, Any], message: str) -> None:
    loader = make(view)
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert sum(len(batch) for batch in loader) == 6


def test_a_state_in_the_middle_of_a_batch_of_buckets_is_refused(view: View) -> None:
    buckets = TokenBuckets([5] * 6, token_budget=20, multiple_of=1)
    loader = make(view, batch_size=None, buckets=buckets, drop_last=False)
    state = loader.state_dict()
    with pytest.raises(
        LoaderError, match=r"consumed of the state is 5, in the middle of the batch of .* 4 to 5"
    ):
        loader.load_state_dict({**state, "consumed": 5})
    loader.load_state_dict({**state, "consumed": 4})
    assert [len(batch) for batch in loader] == [2]


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


@pytest.mark.parametrize(
    ("value", "shape", "kind"),
    [
        (np.float32(3), (2,), torch.float32),
        (4, (2,), torch.int64),
        (np.array([1, 2], ">i2"), (2, 2), torch.int16),
        (np.zeros((0, 3), np.bool_), (2, 0, 3), torch.bool),
    ],
)
def test_fields_give_any_numbers(view: View, value: Any, shape: tuple[int, ...], kind: torch.dtype) -> None:
    found = next(iter(make(view, image=None, fields={"a": Gives(value)}))).tensors["a"]
    assert found.shape == shape and found.dtype == kind
    assert all(bool((row.numpy() == value).all()) for row in found)


@pytest.mark.parametrize("value", [None, "abc", np.zeros(2, np.longdouble)])
def test_fields_that_give_no_numbers_are_told(view: View, value: Any) -> None:
    with pytest.raises(SampleError, match=r"the field 'a' gave .*, wanted an array of numbers"):
        next(iter(make(view, image=None, fields={"a": Gives(value)})))


def test_ids_that_do_not_fit_are_told(view: View) -> None:
    text = TextField(tokenizer=lambda text: [2**63])
    with pytest.raises(SampleError, match=r"gave the id 9223372036854775808, wanted 0\.\."):
        next(iter(make(view, image=None, texts={"caption": text})))


class Stops(Gives):
    def read(self, raw: Any) -> np.ndarray:
        raise StopIteration


def test_a_field_that_stops_an_iteration_is_a_bad_sample(view: View) -> None:
    with pytest.raises(SampleError, match=r"sample '\d' \(row \d\)"):
        list(make(view, image=None, fields={"a": Stops(None)}))


class Closes(Gives):
    """Closes the loader while the loop waits for a batch."""

    def read(self, raw: Any) -> np.ndarray:
        try:
            self.value.close()
        except LoaderError as error:
            self.told = str(error)
        return np.zeros(1)


def test_closing_from_another_thread_says_what_to_do(view: View) -> None:
    field = Closes(None)
    # One batch holds every row, so that whichever row is read, the loop is waiting for it.
    field.value = loader = make(view, batch_size=6, image=None, fields={"a": field})
    assert sum(len(batch) for batch in loader) == 6
    assert "leave their loops" in field.told


def test_closing_twice_and_reading_on(view: View) -> None:
    loader = make(view)
    running = iter(loader)
    next(running)
    loader.close()
    loader.close()
    assert next(running, None) is None
    assert sum(len(batch) for batch in loader) == 6
