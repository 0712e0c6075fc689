from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFilter

from recipes.worlds.shapes import PAPER, Scene, Thing, all_scenes, caption_of, draw_scene
from recipes.worlds.shapes_judge import SceneJudge
from unirl.errors import ShapeError
from unirl.types import Sample

JUDGE = SceneJudge()
SCENES = all_scenes()
PAIRS = all_scenes(max_things=2)[len(SCENES) :]


def _drawings(scenes: tuple[Scene, ...], each: int) -> list[tuple[Scene, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(scene, draw_scene(scene, rng)) for scene in scenes for _ in range(each)]


def test_reads_every_clean_scene_exactly() -> None:
    assert [scene for scene, image in _drawings(SCENES, 4) if JUDGE.read(image) != scene] == []


def test_reads_two_things_exactly() -> None:
    assert [scene for scene, image in _drawings(PAIRS[::5], 1) if JUDGE.read(image) != scene] == []


def test_reads_through_blur_and_noise() -> None:
    rng = np.random.default_rng(1)
    for scene, image in _drawings(SCENES, 1):
        soft = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1)))
        assert JUDGE.read(soft) == scene
        noisy = np.clip(image + rng.normal(0, 15, image.shape), 0, 255).astype(np.uint8)
        assert JUDGE.read(noisy) == scene


def test_garbage_is_no_scene() -> None:
    rng = np.random.default_rng(2)
    assert JUDGE.read(np.full((32, 32, 3), PAPER, np.uint8)) is None
    assert JUDGE.read(np.zeros((32, 32, 3), np.uint8)) is None
    assert JUDGE.read(rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)) is None
    for _, image in _drawings(SCENES, 1):
        patches = image.reshape(8, 4, 8, 4, 3).swapaxes(1, 2).reshape(64, 4, 4, 3)
        shuffled = rng.permutation(patches).reshape(8, 8, 4, 4, 3).swapaxes(1, 2).reshape(32, 32, 3)
        assert JUDGE.read(shuffled) is None


def test_things_that_do_not_go_together_are_no_scene() -> None:
    crowded = (Thing("small", "red", "circle", "left"), Thing("small", "red", "circle", "top"))
    assert JUDGE.read(draw_scene(crowded, np.random.default_rng(0))) is None


def test_judges_by_picture_and_words() -> None:
    scene, other = SCENES[0], SCENES[1]
    image = draw_scene(scene, np.random.default_rng(0))
    samples = [
        Sample(key="k", direction=direction, caption=caption, image=image, target=caption_of(other))
        for direction, caption in (
            ("image", caption_of(scene)),
            ("text", caption_of(scene)),
            ("text", caption_of(other)),
            ("image", "a large"),
        )
    ]
    verdicts = JUDGE.judge(samples)
    assert verdicts.dtype == np.float64
    assert verdicts.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert JUDGE.judge([]).shape == (0,)


def test_a_picture_of_another_shape_is_an_error() -> None:
    with pytest.raises(ShapeError, match=r"found uint8 \(16, 16, 3\), wanted uint8 \(32, 32, 3\)"):
        JUDGE.read(np.zeros((16, 16, 3), np.uint8))
