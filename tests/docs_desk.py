"""What lies in the folder of someone who follows the pages: files, a store, models, two finished runs.

Load it with `runpy.run_path`, since the tests are no package.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3Config, Qwen3ForCausalLM

from datapipe import ingest
from recipes.shapes import shapes
from recipes.tiny_models import TinyJoint
from recipes.worlds.shapes import all_captions, all_scenes, caption_of, draw_scene
from storage import FeatureStore
from tools.video_clips import make_clip
from unirl.config import replace_settings
from unirl.explore import write_report
from unirl.policies.vocabulary import word_tokenizer
from unirl.trainer.run import run_recipe

NUM_PHOTOS = 112
NUM_CLIPS = 8
SETTINGS = (
    *("data.num_sft=48", "data.num_rl=32", "data.num_eval=24", "num_evaluation_prompts=6"),
    *("tokenizer.steps=4", "sft.steps=4", "reward.steps=4", "tokenizer.batch_size=16", "sft.batch_size=16"),
    *("reward.batch_size=16", "sft.config.width=64", "sft.config.num_layers=2", "settings.micro_prompts=4"),
    *(f"{stage}.{setting}" for stage in ("text", "image") for setting in (
        "steps=2", "prompts_per_step=4", "group_size=2", "replay_prompts=0"
    )),
)  # fmt: skip
"""Of the runs, and of the file small.txt."""


def make_files(desk: Path) -> None:
    """`photos/` with a table, `clips/`, a list of prompts, settings."""
    (desk / "photos").mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for number, scene in enumerate(all_scenes()[:NUM_PHOTOS]):
        buffer = io.BytesIO()
        Image.fromarray(draw_scene(scene, rng)).save(buffer, "PNG")
        (desk / "photos" / f"{number:04d}.png").write_bytes(buffer.getvalue())
        row = {"file_name": f"{number:04d}.png", "caption": caption_of(scene)}
        row |= {"split": "sft" if number < 96 else "rl", "level": "easy" if number % 2 else "hard"}
        rows.append(row | {"kind": "chart" if number % 5 == 0 else "photo"})
    (desk / "photos" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (desk / "clips").mkdir()
    for number in range(NUM_CLIPS):
        (desk / "clips" / f"{number:04d}.mp4").write_bytes(make_clip(64 + number))
        (desk / "clips" / f"{number:04d}.txt").write_text("numbers go by")
    (desk / "prompts.txt").write_text("".join(f"{caption}\n" for caption in all_captions()[:40]))
    (desk / "small.txt").write_text("".join(f"{it}\n" for it in SETTINGS if not it.startswith("data.")))


def make_stores(desk: Path) -> None:
    """`store`, pictures, videos and a tensor column in nine snapshots; `data/store`, the same; `damaged`."""
    ingest(str(desk / "photos"), str(desk / "store"), key_prefix="photos", commit_rows=16)
    ingest(str(desk / "clips"), str(desk / "store"))
    store = FeatureStore.open(desk / "store")
    codes = np.zeros((len(store), 4), np.int16)
    store.add_column("codes", zip(store.select().keys(), codes), dtype="int16", shape=(4,))
    shutil.copytree(desk / "store", desk / "data" / "store")
    shutil.copytree(desk / "store", desk / "damaged")
    blob = bytes(store.blob(3))
    for path in (desk / "damaged" / "blobs").rglob("data.mdb"):
        path.write_bytes(path.read_bytes().replace(blob, blob[:-1] + bytes([blob[-1] ^ 1])))


def make_models(desk: Path) -> None:
    """Models with random weights: a policy, a tokenizer, a reward, a CLIP, a language model."""
    models = desk / "models"
    TinyJoint().write(models, seed=0)
    for old, new in (("vqa", "reward"), ("similarity", "clip"), ("tokenizer", "vq")):
        shutil.copytree(models / old, models / new)
    words = word_tokenizer(all_captions())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=len(words), num_attention_heads=2, num_key_value_heads=2, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(models / "qwen3")
    words.save_pretrained(models / "qwen3")


def make_runs(desk: Path) -> None:
    """`runs/demo`, a few steps of each stage, and a copy of it."""
    run_recipe(
        replace_settings(shapes(), SETTINGS),
        desk / "runs" / "demo",
        assignments=SETTINGS,
        write_report=write_report,
    )
    shutil.copytree(desk / "runs" / "demo", desk / "runs" / "demo-2")


PARTS = {"files": make_files, "stores": make_stores, "models": make_models, "runs": make_runs}
"""In the order in which they are made: the stores come out of the files."""
