"""Videos as prompts: the frames that are kept are the frames of the file, and prompts show them in order."""

from __future__ import annotations

import io
import types
from pathlib import Path

import av
import numpy as np
import pytest

from datapipe import ClipField, ingest
from datapipe.video_clips import read_clips
from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.rollout.native import NativeEngine
from unirl.trainer.clips import add_frames, encode_frames, frame_batches
from unirl.trainer.collect import roll_out, samples_of
from unirl.trainer.prompts import all_prompts
from unirl.types import SamplingSettings

CLIP = ClipField(length_s=1.0, fps=3)


def video(shade: int) -> bytes:
    """Six frames of 16 x 16 in a second, each brighter than the one before."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for i in range(6):
            picture = np.full((16, 16, 3), shade + 20 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    root = tmp_path_factory.mktemp("clips")
    (root / "videos").mkdir()
    for number in range(4):
        (root / "videos" / f"{number}.mp4").write_bytes(video(20 + 10 * number))
        (root / "videos" / f"{number}.txt").write_text("dark and light")
    ingest(root / "videos", root / "store")
    return FeatureStore.open(root / "store")


@pytest.fixture(scope="module")
def encoded(store: FeatureStore, toy: types.SimpleNamespace) -> FeatureStore:
    with_frames = add_frames(store, CLIP, image_size=8)
    encode_frames(with_frames, toy.make_tokenizer())
    return with_frames.refresh()


def test_frames_are_those_of_the_file(encoded: FeatureStore) -> None:
    view = encoded.select()
    kept = encoded.tensor("frames").gather(view.rows)
    sized = ClipField(length_s=1.0, fps=3, size=(8, 8))
    for row, frames in zip(view.rows, kept, strict=True):
        assert (read_clips(encoded.blob(int(row)), [0.0], sized)[0] == frames).all()
    brightness = kept.mean(axis=(2, 3, 4))
    assert (np.diff(brightness, axis=1) > 20).all()


def test_a_second_call_computes_nothing_again(encoded: FeatureStore, toy: types.SimpleNamespace) -> None:
    snapshot = encoded.snapshot.id
    assert add_frames(encoded, CLIP, image_size=8).snapshot.id == snapshot
    encode_frames(encoded, toy.make_tokenizer())
    assert encoded.refresh().snapshot.id == snapshot


def test_prompts_show_the_frames_in_order_and_samples_carry_the_clip(
    encoded: FeatureStore, toy: types.SimpleNamespace
) -> None:
    tokenizer, policy = toy.make_tokenizer(), toy.make_policy()
    prompts = all_prompts(encoded.select(), "text", image_size=8)
    kept = encoded.tensor("frames").gather(encoded.select().rows)
    for prompt, frames in zip(prompts, kept, strict=True):
        assert prompt.context_images is not None and prompt.context_codes is not None
        assert (np.concatenate([prompt.context_images, prompt.image[None]]) == frames).all()
        codes = [*prompt.context_codes.ravel().tolist(), *prompt.codes.tolist()]
        ids = [i for i in policy.prompt_ids(prompt) if i >= policy.vocabulary.grid.offset]
        assert [i - policy.vocabulary.grid.offset for i in ids] == codes
    rollouts = roll_out(
        NativeEngine(policy), prompts, group_size=2, length=4, sampling=SamplingSettings(),
        seeds=[(0, 0, i) for i in range(4)], micro_prompts=4,
    )  # fmt: skip
    samples = samples_of(policy, tokenizer, rollouts[0])
    assert all((sample.clip == kept[i // 2]).all() for i, sample in enumerate(samples))


def test_single_frames_come_from_all_places_of_the_clips(encoded: FeatureStore) -> None:
    batches = frame_batches(encoded.select(), batch_size=4, seed=0)
    seen = {round(float(frame.mean()), 1) for _ in range(8) for frame in next(batches)}
    assert next(batches).shape == (4, 3, 8, 8)
    assert len(seen) > 6


def test_a_store_with_pictures_and_a_clip_of_one_frame_are_refused(
    tmp_path: Path, store: FeatureStore, toy: types.SimpleNamespace
) -> None:
    pictures = toy.make_store(tmp_path / "pictures", encoded=False)
    with pytest.raises(ConfigError, match="32 of 32 rows are no videos"):
        add_frames(pictures, CLIP, image_size=8)
    with pytest.raises(ConfigError, match="is one picture"):
        add_frames(store, ClipField(length_s=1.0, fps=1), image_size=8)
