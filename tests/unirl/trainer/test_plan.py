"""A plan says what a run would do and everything that stands in its way, and writes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.motion import motion
from recipes.own_data import OwnData, own_data
from recipes.shapes import shapes
from storage import FeatureStore
from unirl.config import replace_settings
from unirl.errors import ConfigError
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.trainer.clone import clone_store
from unirl.trainer.plan import plan_run
from unirl.trainer.plan_policy import require_words
from unirl.trainer.prepare import require_sources
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.run_record import recipe_record

SMALL = ("text.prompts_per_step=8", "image.prompts_per_step=8", "num_evaluation_prompts=2")


def own(store: FeatureStore, *settings: str) -> Recipe:
    recipe = replace(own_data(), data=OwnData(store=str(store.path)))
    return replace_settings(recipe, [*SMALL, *settings])


def test_a_recipe_that_makes_its_data_can_start(tmp_path: Path) -> None:
    recipe = shapes(seed=4)
    plan = plan_run(recipe, tmp_path / "run", world_size=2)
    assert plan.problems == () and plan.store is None and plan.rows == {} and plan.seed == 4
    assert [stage.name for stage in plan.stages] == ["text", "image"]
    text, image = plan.stages
    assert (text.samples_per_step, text.micro_batches, text.optimizer_steps) == (128, 1, 20)
    assert (text.max_response_tokens, image.max_response_tokens) == (9, 64)
    assert not any(plan.prepared.values()) and list(tmp_path.iterdir()) == []


def test_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    recipe = shapes()
    vocabulary = JointVocabulary.from_captions(recipe.data.captions(), num_codes=128, rows=8, columns=8)
    policy = TokenLM.create(recipe.sft.config, vocabulary, seed=0)
    plan = plan_run(recipe, tmp_path / "run")
    assert plan.parameters["policy"] == sum(p.numel() for p in policy.lm.parameters())
    assert plan.parameters["critic"] == sum(p.numel() for p in policy.critic.parameters())
    assert plan.vocabulary["text_ids"] + plan.vocabulary["image_codes"] == vocabulary.size
    assert plan.memory_bytes["peak"] >= plan.memory_bytes["weights"] >= 4 * plan.parameters["policy"]


def test_rows_of_a_store_are_counted(toy_store: FeatureStore, tmp_path: Path) -> None:
    plan = plan_run(own(toy_store), tmp_path / "run")
    assert plan.problems == (), plan.problems
    assert plan.num_rows == 32
    assert plan.rows["text.prompts"] + plan.rows["evaluation_rows"] == 32
    assert plan.stages[0].num_prompts == plan.rows["text.prompts"]


def test_everything_that_is_wrong_is_told_at_once(toy_store: FeatureStore, tmp_path: Path) -> None:
    wrong = (
        *("text.prompts_per_step=7", "text.top_p=0.5", "image.prompts=shade > 3", "sft.config.max_length=40"),
        *("evaluation_rows=true", "reward.model=nowhere", "text.max_words=2", "warm_up_rows=row < 0"),
    )
    plan = plan_run(own(toy_store, *wrong), tmp_path / "run", world_size=2)
    told = "\n".join(plan.problems)
    for words in (
        "prompts_per_step 7 is not a multiple of 2 ranks x micro_prompts 8",
        "top_p is 0.5",
        "image.prompts: the query failed: there is no column 'shade'",
        "the policy has 40; raise sft.config.max_length",
        "28 of its rows are also trained on",
        "reward.model: nowhere: there is no such folder",
        "warm_up_rows: no row",
    ):
        assert words in told, told
    assert "the longest caption has 3 words, answers are cut at max_words 2" in plan.notes[0]


def test_words_that_the_vocabulary_lacks_are_told(toy_store: FeatureStore, tmp_path: Path) -> None:
    class Forgetful(OwnData):
        def captions(self) -> list[str]:
            return ["black and white"]

    recipe = replace(own(toy_store), data=Forgetful(store=str(toy_store.path)))
    (problem,) = plan_run(recipe, tmp_path / "run").problems
    assert "captions have words that the vocabulary lacks" in problem


def test_a_named_policy_without_the_words_or_its_image_tokenizer_is_told(
    toy_store: FeatureStore, tmp_path: Path
) -> None:
    """The recipe's captions() cannot mend it."""
    vocabulary = JointVocabulary.from_captions(["black"], num_codes=16, rows=2, columns=2)
    TokenLM.create(own_data().sft.config, vocabulary, seed=0).save(tmp_path / "policy")
    plan = plan_run(own(toy_store, f"sft.model={tmp_path / 'policy'}"), tmp_path / "run")
    (problem,) = plan.problems
    assert f"teach the policy of sft.model {tmp_path / 'policy'} these words" in problem
    assert any("name the one that the policy was made with" in note for note in plan.notes)


def test_a_run_is_refused_captions_that_a_named_policy_cannot_read(
    toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Before it trains on the others; rows that no condition takes do not matter."""
    captions = sorted(set(toy_store.select().column("caption").to_pylist()))
    known, strange = captions[0], captions[-1]
    vocabulary = JointVocabulary.from_captions([known], num_codes=16, rows=2, columns=2)
    recipe = own(toy_store, "sft.model=models/mine")
    readable, unreadable = (toy_store.select(f"caption = '{text}'") for text in (known, strange))
    require_words(recipe, vocabulary, [readable])
    with pytest.raises(
        ConfigError, match=rf"1 captions have words .* first '{strange}'; teach the policy of"
    ):
        require_words(recipe, vocabulary, [readable, unreadable])
    TokenLM.create(recipe.sft.config, vocabulary, seed=0).save(tmp_path / "policy")
    where = f"caption = '{known}'"
    used = own(toy_store, f"sft.model={tmp_path / 'policy'}", f"warm_up_rows={where}", f"reward_rows={where}")
    used = replace(used, stages=tuple(replace(stage, prompts=where) for stage in used.stages))
    for evaluated, is_told in ((f"NOT ({where})", True), (where, False)):
        problems = plan_run(replace(used, evaluation_rows=evaluated), tmp_path / "run").problems
        assert any("vocabulary lacks" in problem for problem in problems) == is_told


def test_a_run_needs_the_store_and_models_it_took_no_longer(toy_store: FeatureStore, tmp_path: Path) -> None:
    """They were copied into it, so that it goes on from another folder, or when they are gone."""
    run = tmp_path / "run"
    recipe = replace(own_data(), data=OwnData(store="gone"))
    recipe = replace_settings(recipe, [*SMALL, "tokenizer.model=gone", "sft.model=gone", "reward.model=gone"])
    told = plan_run(recipe, run).problems
    assert len([problem for problem in told if "gone: there is no such folder" in problem]) >= 4, told
    clone_store(Path(toy_store.path), run / "store")
    captions = toy_store.select().column("caption").to_pylist()
    vocabulary = JointVocabulary.from_captions(captions, num_codes=16, rows=2, columns=2)
    TokenLM.create(recipe.sft.config, vocabulary, seed=0).save(run / "models" / "sft")
    for name in ("tokenizer", "reward"):
        (run / "models" / name).mkdir()
    assert plan_run(recipe, run).problems == ()
    require_sources(recipe, run)


def test_a_directory_with_another_run_is_told(toy_store: FeatureStore, tmp_path: Path) -> None:
    recipe = own(toy_store)
    RunDirectory(tmp_path).record(recipe="own_data", config=recipe_record(recipe), seed=0, assignments=[])
    assert plan_run(recipe, tmp_path).problems == ()
    (problem,) = plan_run(replace_settings(recipe, ["text.steps=3"]), tmp_path).problems
    assert "holds a run with config.stages.0.steps = 60, asked for 3" in problem


def test_a_recipe_of_videos_without_a_reward_model(tmp_path: Path) -> None:
    """Its prompts show every frame, and there is no reward to prepare."""
    recipe = motion()
    plan = plan_run(recipe, tmp_path / "run")
    assert plan.problems == () and "models/reward" not in plan.prepared
    short = replace_settings(recipe, ["sft.config.max_length=32"])
    assert any(
        "raise sft.config.max_length" in problem for problem in plan_run(short, tmp_path / "r").problems
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_needs_an_evaluation_prompt(
    toy_store: FeatureStore, toy: SimpleNamespace, tmp_path: Path, world_size: int
) -> None:
    recipe = own(toy_store, "evaluation_rows=key = 'toy/00'", "text.prompts=key <> 'toy/00'")
    recipe = replace_settings(recipe, ["image.prompts=key <> 'toy/00'", "tokenizer_rows=key <> 'toy/00'"])
    recipe = replace_settings(recipe, ["warm_up_rows=key <> 'toy/00'", "reward_rows=key <> 'toy/00'"])
    told = plan_run(recipe, tmp_path / "run", world_size=world_size).problems
    assert any("evaluation_rows: 1 prompts for 3 ranks" in problem for problem in told) == (world_size == 3)


def test_sizes_of_a_policy_that_is_named_are_read_off_its_folder(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    policy = toy.make_policy()
    policy.save(tmp_path / "policy")
    plan = plan_run(own(toy_store, f"sft.model={tmp_path / 'policy'}"), tmp_path / "run")
    assert plan.problems == ()
    assert plan.parameters == {"policy": sum(p.numel() for p in policy.lm.parameters())}
    assert (plan.vocabulary["codes_per_picture"], plan.vocabulary["positions"]) == (4, 64)
    (tmp_path / "policy" / "image_grid.json").unlink()
    (problem,) = plan_run(own(toy_store, f"sft.model={tmp_path / 'policy'}"), tmp_path / "run").problems
    assert "sft.model: " in problem and "no image_grid.json" in problem


def test_sizes_of_a_policy_that_the_run_makes_are_not_known_yet(
    toy_store: FeatureStore, tmp_path: Path
) -> None:
    plan = plan_run(own(toy_store, "sft.model={models}/start/policy"), tmp_path / "run")
    assert plan.problems == () and plan.memory_bytes == {}
    assert plan.notes == ("the policy is not there yet, so its sizes and memory are not known",)
