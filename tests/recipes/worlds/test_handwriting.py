from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.worlds.handwriting import (
    DigitPools,
    all_captions,
    caption_of,
    choose_held_out,
    deal_digits,
    write_numbers,
)
from recipes.worlds.world_files import WorldFiles
from unirl.errors import ConfigError

SIZES = {"num_sft": 160, "num_rl": 90, "num_eval": 60}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> WorldFiles:
    return write_numbers(tmp_path_factory.mktemp("worlds") / "numbers", seed=0, **SIZES)


def _digest(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_sft_is_a_png_folder_with_a_table(world: WorldFiles) -> None:
    with (world.sft / "metadata.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == SIZES["num_sft"]
    assert rows[0].keys() == {"file_name", "caption", "split"}
    assert {row["split"] for row in rows} == {"sft"}
    assert {row["caption"] for row in rows} <= set(all_captions())
    with Image.open(world.sft / rows[0]["file_name"]) as image:
        assert (image.format, image.size, image.mode) == ("PNG", (32, 32), "RGB")


def test_rl_is_a_jpeg_folder_with_json_lines(world: WorldFiles) -> None:
    rows = [json.loads(line) for line in (world.rl / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == SIZES["num_rl"]
    assert all(row["caption"] == caption_of(row["number"]) and row["split"] == "rl" for row in rows)
    with Image.open(world.rl / rows[0]["file_name"]) as image:
        assert (image.format, image.size) == ("JPEG", (32, 32))


def test_eval_is_a_webdataset_tar_half_of_it_held_out(world: WorldFiles) -> None:
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(world.eval) as tar:
        for member in tar:
            key, extension = member.name.split(".")
            file = tar.extractfile(member)
            assert file is not None
            samples.setdefault(key, {})[extension] = file.read()
    assert len(samples) == SIZES["num_eval"]
    num_held_out = 0
    for sample in samples.values():
        row = json.loads(sample["json"])
        caption = sample["txt"].decode()
        assert caption == caption_of(row["number"])
        assert row["held_out"] == (caption in world.held_out)
        assert np.asarray(Image.open(io.BytesIO(sample["png"]))).shape == (32, 32, 3)
        num_held_out += row["held_out"]
    assert num_held_out == SIZES["num_eval"] // 2


def test_training_splits_never_show_a_held_out_number(world: WorldFiles) -> None:
    shown = (world.sft / "metadata.csv").read_text() + (world.rl / "metadata.jsonl").read_text()
    assert len(world.held_out) == 18
    assert not [caption for caption in world.held_out if caption + "," in shown or f'"{caption}"' in shown]


def test_same_seed_same_bytes_and_a_second_call_writes_nothing(world: WorldFiles, tmp_path: Path) -> None:
    again = write_numbers(tmp_path / "numbers", seed=0, **SIZES)
    before = _digest(world.directory)
    assert _digest(again.directory) == before
    (again.rl / "00000.jpg").unlink()
    assert write_numbers(tmp_path / "numbers", seed=0, **SIZES) == again
    assert not (again.rl / "00000.jpg").exists()


def test_other_parameters_are_refused_with_the_difference(world: WorldFiles) -> None:
    with pytest.raises(ConfigError, match=r"num_rl is 90, wanted 91\); delete it"):
        write_numbers(world.directory, seed=0, **{**SIZES, "num_rl": 91})


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds no world\.json"):
        write_numbers(tmp_path, seed=0, **SIZES)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failure_leaves_no_half_written_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("recipes.worlds.world_files._write_tar", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_numbers(tmp_path / "numbers", seed=0, **SIZES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(5))
def test_each_digit_stays_in_training_at_either_place(seed: int) -> None:
    held_out = choose_held_out(seed)
    assert len(held_out) == 18
    assert all(21 <= number <= 99 and number % 10 for number in held_out)
    tens = Counter(number // 10 for number in held_out)
    units = Counter(number % 10 for number in held_out)
    assert set(tens.values()) <= {2, 3}
    assert set(units.values()) == {2}


@pytest.mark.parametrize("count", [0, 1, 36])
def test_any_number_of_held_out_numbers_can_be_chosen(count: int) -> None:
    assert len(choose_held_out(3, count=count)) == count


def test_too_many_held_out_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="found 37, wanted 0 to 36"):
        choose_held_out(0, count=37)


def test_pools_are_disjoint_stratified_and_hold_every_digit() -> None:
    dealt = deal_digits(0, DigitPools())
    sizes = {pool: sum(len(images) for images in digits.values()) for pool, digits in dealt.items()}
    assert sum(sizes.values()) == 1797
    wanted = {"judge": 600, "sft": 350, "rl": 550, "eval": 297}
    assert all(abs(sizes[pool] - wanted[pool]) <= 5 for pool in wanted)
    for digit in range(10):
        images = [image.tobytes() for pool in dealt.values() for image in pool[digit]]
        assert len(images) == len(set(images))
        assert {len(pool[digit]) * 10 // sizes[name] for name, pool in dealt.items()} <= {0, 1}


def test_a_pool_that_would_be_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match="of digit 0 to eval"):
        deal_digits(0, DigitPools(judge=600, sft=600, rl=597))


def test_captions_are_the_ninety_numbers() -> None:
    captions = all_captions()
    assert len(set(captions)) == 90
    assert captions[32] == "a handwritten forty two"
