from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.janus.modeling_janus import JanusVQVAE

from storage import FeatureStore
from unirl.cli import main
from unirl.policies.token_lm import TokenLM
from unirl.rewards import VlmYesNo
from unirl.types import Sample

Unirl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def unirl(capsys: pytest.CaptureFixture[str]) -> Unirl:
    """Call the command line; returns exit code, output and error output."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.mark.slow
def test_tokenizer_codes_policy_and_reward_from_a_store(
    unirl: Unirl, toy: SimpleNamespace, tmp_path: Path
) -> None:
    """The four commands one after the other, two steps each; everything loads with transformers' classes."""
    store = toy.make_store(tmp_path / "store", encoded=False).path
    tokenizer, policy, reward = (tmp_path / name for name in ("tokenizer", "policy", "reward"))
    few = ("--steps", 4, "--batch-size", 8)

    code, said, error = unirl("tokenizer", "train", store, "--out", tokenizer, *few, "--num-codes", 16)
    assert code == 0, error
    assert said.startswith(f"{tokenizer}: mean squared error ") and "of 16 codes used" in said
    assert JanusVQVAE.from_pretrained(tokenizer).config.num_embeddings == 16

    for _ in range(2):
        code, said, error = unirl("tokenizer", "encode", store, "--tokenizer", tokenizer)
        assert (code, said) == (0, f"{store}: column image_codes is complete\n"), error
    code, said, _ = unirl("tokenizer", "encode", store, "--tokenizer", tokenizer, "--json")
    assert json.loads(said) == {"store": str(store), "column": "image_codes", "num_rows": 32}
    opened = FeatureStore.open(store)
    assert opened.tensor_columns == {"image_codes": (np.dtype("int16"), (64,))}
    assert len(opened.snapshots()) == 3, "what is encoded is not encoded again"

    code, said, error = unirl("sft", store, "--tokenizer", tokenizer, "--out", policy, *few)
    assert code == 0, error
    assert "text loss" in said and "nats a token" in said
    lm = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert lm.get_input_embeddings().num_embeddings == TokenLM.load(policy).vocabulary.size

    code, said, error = unirl("reward", "train", store, "--out", reward, *few)
    assert code == 0, error
    sample = Sample(key="p", direction="image", caption="dark and light", image=toy.picture(3), target="")
    assert 0 < float(VlmYesNo.load(reward).score([sample]).total[0]) < 1


@pytest.mark.parametrize("command", [("tokenizer", "train"), ("sft",), ("reward", "train")])
def test_a_folder_with_something_in_it_is_left_alone(
    unirl: Unirl, toy_store: FeatureStore, toy: SimpleNamespace, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    toy.make_tokenizer().save(tmp_path / "tokenizer")
    options = ("--tokenizer", tmp_path / "tokenizer") if command == ("sft",) else ()
    code, _, said = unirl(*command, toy_store.path, "--out", tmp_path / "model", *options)
    assert code == 1
    assert said == f"error: {tmp_path / 'model'}: there is something in it; name a new folder for the model\n"
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", [("tokenizer", "encode"), ("sft",)])
def test_a_folder_that_is_no_model_is_said(
    unirl: Unirl, toy_store: FeatureStore, tmp_path: Path, command: tuple[str, ...]
) -> None:
    out = ("--out", tmp_path / "out") if command == ("sft",) else ()
    (tmp_path / "notes").mkdir()
    for folder, wrong in (("nothing", "there is no such folder"), ("notes", "no config.json")):
        code, _, said = unirl(*command, toy_store.path, "--tokenizer", tmp_path / folder, *out)
        assert code == 1 and said.startswith(f"error: {tmp_path / folder}: {wrong}")
    assert not (tmp_path / "out").exists(), "nothing is left behind"


def test_a_store_that_is_not_there_leaves_no_folder(unirl: Unirl, tmp_path: Path) -> None:
    code, _, said = unirl("tokenizer", "train", tmp_path / "nothing", "--out", tmp_path / "out", "--steps", 1)
    assert code == 1
    assert said.startswith("error: ") and "nothing" in said
    assert not (tmp_path / "out").exists()


def test_a_condition_that_selects_nothing_is_said(
    unirl: Unirl, toy_store: FeatureStore, tmp_path: Path
) -> None:
    code, _, said = unirl(
        *("tokenizer", "train", toy_store.path, "--out", tmp_path / "out", "--where", "split = 'none'")
    )
    assert code == 1
    assert said.startswith("error: ") and "split = 'none'" in said
    assert not (tmp_path / "out").exists()


def test_a_size_that_does_not_fit_the_patch_is_said(
    unirl: Unirl, toy_store: FeatureStore, tmp_path: Path
) -> None:
    code, _, said = unirl("tokenizer", "train", toy_store.path, "--out", tmp_path / "t", "--image-size", 30)
    assert code == 1
    assert said.startswith("error: image_size 30 is not a multiple of 4")
    assert not (tmp_path / "t").exists()
