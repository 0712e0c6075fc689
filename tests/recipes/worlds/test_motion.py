"""The motion world: what is drawn, written as video and read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from datapipe import ClipField
from datapipe.video_clips import read_clips
from recipes.worlds.motion import (
    CLIP_FPS,
    DURATION_S,
    MAX_SHIFT,
    all_motions,
    choose_held_out,
    motion_captions,
    motion_in_caption,
    render_frames,
    write_motion,
)
from recipes.worlds.motion_judge import MotionJudge, MotionReward
from unirl.errors import ConfigError
from unirl.types import Sample

SIZES = {"num_sft": 12, "num_rl": 8, "num_eval": 12, "num_held_out": 12, "num_sft_motions": 6}


def sample(clip: np.ndarray | None, caption: str) -> Sample:
    picture = np.zeros((32, 32, 3), np.uint8) if clip is None else clip[-1]
    return Sample(key="k", direction="text", caption=caption, image=picture, target=caption, clip=clip)


def test_a_caption_reads_back_as_its_motion() -> None:
    assert len(set(motion_captions())) == 48
    assert [motion_in_caption(str(motion)) for motion in all_motions()] == list(all_motions())
    assert motion_in_caption("a red square moves") is None


def test_held_out_motions_show_everything_about_equally_often() -> None:
    hidden = choose_held_out(3)
    assert len(hidden) == 12
    for name, times in {"colour": 3, "shape": 4, "heading": 3}.items():
        values = [getattr(motion, name) for motion in hidden]
        assert {values.count(value) for value in values} == {times}
    with pytest.raises(ConfigError, match="wanted 0 to 24"):
        choose_held_out(3, count=25)


def test_written_clips_show_what_their_captions_say(tmp_path: Path) -> None:
    files = write_motion(tmp_path / "world", seed=1, **SIZES)
    clip = ClipField(length_s=DURATION_S, fps=CLIP_FPS)
    samples = []
    for folder in (files.sft, files.rl, files.eval):
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        assert folder is files.eval or not any(
            row["held_out"] or row["caption"] in files.held_out for row in rows
        )
        for row in rows:
            frames = read_clips(str(folder / row["file_name"]), [0.0], clip)[0]
            samples.append(sample(frames, row["caption"]))
    assert MotionJudge().judge(samples).tolist() == [1.0] * 32
    assert len({one.caption for one in samples[:12]}) == 6
    assert MotionReward().score(samples).total.mean() > 0.95
    before = (files.sft / "00000.mp4").stat().st_mtime_ns
    assert write_motion(tmp_path / "world", seed=1, **SIZES) == files
    assert (files.sft / "00000.mp4").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="holds another world"):
        write_motion(tmp_path / "world", seed=2, **SIZES)


def test_one_wrong_word_is_wrong_to_the_judge_and_costs_a_third() -> None:
    motion = motion_in_caption("a red square moves left")
    assert motion is not None
    clip = render_frames(motion, shift=MAX_SHIFT, fps=CLIP_FPS)
    captions = [
        "a red square moves left",
        "a blue square moves left",
        "a red circle moves left",
        "a red square moves up",
        "red square left",
    ]
    samples = [sample(clip, caption) for caption in captions]
    assert MotionJudge().judge(samples).tolist() == [1, 0, 0, 0, 0]
    assert MotionReward().score(samples).total == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3, 0])


def test_without_a_clip_nothing_is_said() -> None:
    samples = [sample(None, "a red square moves left")]
    assert np.isnan(MotionJudge().judge(samples)).all()
    assert np.isnan(MotionReward().score(samples).total).all()
