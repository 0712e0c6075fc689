from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.trainer.model_training import encode_pictures
from unirl.trainer.prompts import PromptSource, all_prompts, prompts_from_batch, select_prompts


def source(toy_store: FeatureStore, **options: int) -> PromptSource:
    arguments = {"image_size": 8, "prompts_per_step": 4, "seed": 5} | options
    return PromptSource(toy_store.select("split = 'rl'"), "text", **arguments)


def keys(source: PromptSource, steps: int) -> list[list[str]]:
    return [[prompt.key for prompt in source.next()] for _ in range(steps)]


def test_prompts_carry_what_both_directions_need(toy: SimpleNamespace, toy_store: FeatureStore) -> None:
    prompts = all_prompts(toy_store.select("split = 'eval'"), "image", image_size=8)
    assert [prompt.key for prompt in prompts] == [f"toy/{n:02d}" for n in range(0, 32, 4)]
    codes = toy_store.tensor("image_codes")
    for number, prompt in zip(range(0, 32, 4), prompts, strict=True):
        assert prompt.direction == "image"
        assert prompt.caption == toy.CAPTIONS[number % 16]
        assert (prompt.image == toy.picture(number)).all()
        assert (prompt.codes == codes[number : number + 1][0]).all()


def test_a_row_without_a_caption_is_named() -> None:
    batch = SimpleNamespace(
        tensors={}, images=None, keys=["a", "b"], columns={"caption": ["dark", None]}, rows=np.arange(2)
    )
    with pytest.raises(ConfigError, match=r"b: the row has no caption.*caption IS NOT NULL"):
        prompts_from_batch(batch, "image")  # type: ignore[arg-type]


def test_frames_of_a_stored_context_are_shown_first(toy: SimpleNamespace, tmp_path: Path) -> None:
    """A clip's frames, or other pictures, as a tensor column of codes."""
    store = toy.make_store(tmp_path / "store")
    frames = np.arange(3 * toy.LENGTH, dtype=np.int16).reshape(3, toy.LENGTH) % toy.NUM_CODES
    values = [(f"toy/{n:02d}", np.roll(frames, n, axis=0)) for n in range(toy.NUM_ROWS)]
    store.add_column("context_codes", values, dtype="int16", shape=frames.shape)
    prompts = all_prompts(store.refresh().select("split = 'eval'"), "image", image_size=8)
    policy = toy.make_policy()
    for n, prompt in zip(range(0, 32, 4), prompts, strict=True):
        assert prompt.context_codes is not None
        shown = [i for frame in np.roll(frames, n, axis=0) for i in policy.vocabulary.picture(frame.tolist())]
        words = policy.vocabulary.words(prompt.caption)
        assert policy.prompt_ids(prompt) == [policy.vocabulary.bos, *shown, *words, 4]


def test_an_epoch_gives_every_prompt_once(toy_store: FeatureStore) -> None:
    steps = keys(source(toy_store), 12)
    first, second = [*chain(*steps[:6])], [*chain(*steps[6:])]
    assert len(set(first)) == len(first) == 24
    assert set(second) == set(first) and second != first


def test_ranks_share_one_order(toy_store: FeatureStore) -> None:
    whole = keys(source(toy_store), 7)
    ranks = [keys(source(toy_store, rank=rank, world_size=2), 7) for rank in range(2)]
    assert [left + right for left, right in zip(*ranks, strict=True)] == whole


@pytest.mark.parametrize("done", [0, 1, 5, 6, 9])
def test_a_stream_goes_on_behind_what_was_handed_out(toy_store: FeatureStore, done: int) -> None:
    """Also in the middle of an epoch, at its end, and with other numbers of ranks."""
    whole = source(toy_store)
    keys(whole, done)
    state = whole.state_dict()
    rest = keys(whole, 8)
    resumed = source(toy_store)
    keys(resumed, 3)
    resumed.load_state_dict(state)
    assert keys(resumed, 8) == rest
    half = source(toy_store, rank=1, world_size=2)
    half.load_state_dict(state)
    assert keys(half, 8) == [step[2:] for step in rest]


def test_prompts_that_were_read_ahead_are_not_counted(toy_store: FeatureStore) -> None:
    first, second = source(toy_store), source(toy_store)
    keys(first, 2)
    state = first.state_dict()
    first.close()
    second.load_state_dict(state)
    assert keys(second, 1) == keys(source(toy_store), 3)[2:]


def test_a_store_without_codes_names_the_command(toy: SimpleNamespace, tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "store", encoded=False)
    with pytest.raises(ConfigError, match=r"no tensor column 'image_codes'; run `unirl tokenizer encode`"):
        select_prompts(store, "true")


def test_a_condition_that_selects_nothing_is_said(toy_store: FeatureStore) -> None:
    with pytest.raises(ConfigError, match=r"no row where split = 'rll'; see `unirl info"):
        select_prompts(toy_store, "split = 'rll'")


@pytest.fixture
def prompt_list(toy: SimpleNamespace, tmp_path: Path) -> FeatureStore:
    """The toy store without codes, and four prompts without a picture."""
    store = toy.make_store(tmp_path / "store", encoded=False)
    with store.writer(message="prompts") as writer:
        for number in range(4):
            writer.add(f"list/{number}", caption=toy.CAPTIONS[number], split="list")
    return store.refresh()


def test_rows_without_a_picture_get_no_codes(toy: SimpleNamespace, prompt_list: FeatureStore) -> None:
    tokenizer = toy.make_tokenizer()
    for _ in range(2):
        encode_pictures(Path(prompt_list.path), tokenizer)
    store = prompt_list.refresh()
    assert store.snapshot.id == 3, "what is encoded is not encoded again"
    codes = store.tensor("image_codes")
    assert codes.has(store.select("split <> 'list'").rows).all()
    assert not codes.has(store.select("split = 'list'").rows).any()


def test_prompts_without_a_picture_can_be_drawn(toy: SimpleNamespace, prompt_list: FeatureStore) -> None:
    encode_pictures(Path(prompt_list.path), toy.make_tokenizer())
    view = prompt_list.refresh().select("split = 'list' OR row < 2")
    prompts = all_prompts(view, "image", image_size=8)
    assert [prompt.caption for prompt in prompts][-4:] == list(toy.CAPTIONS[:4])
    assert all(prompt.image is None and prompt.codes is None for prompt in prompts)
    stream = PromptSource(view, "image", image_size=8, prompts_per_step=3, seed=0)
    assert len(stream.next()) == 3
