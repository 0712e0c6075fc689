from __future__ import annotations

from dataclasses import replace

import pytest

from unirl.config import replace_settings
from unirl.errors import ConfigError
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import Lesson, ModalitySettings, RunSettings, Stage

STAGE = Stage(name="text", direction="text", prompts="split = 'rl'", steps=3)
SETTINGS = RunSettings()


def check(
    stages: list[Stage], settings: RunSettings = SETTINGS, *, world_size: int = 1, rows: int = 100
) -> None:
    check_stages(stages, settings, world_size=world_size, num_prompts={stage.name: rows for stage in stages})


def test_the_defaults_can_start_on_one_and_two_ranks() -> None:
    for world_size in (1, 2):
        check([STAGE, replace(STAGE, name="image", direction="image")], world_size=world_size)


def test_what_may_be_left_out() -> None:
    check([replace(STAGE, value_clip=None, kl_target=None, dual_clip=None, entropy_target=None)])


def test_samples_per_step() -> None:
    assert replace(STAGE, prompts_per_step=6, group_size=4).samples_per_step == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts_per_step": 12}, r"prompts_per_step 12 is not a multiple of 1 ranks x micro_prompts 8 = 8"),
        ({"prompts_per_step": 0}, r"prompts_per_step must be 1 or more, found 0"),
        ({"updates_per_step": 3}, r"micro_prompts 8 is not a multiple of updates_per_step 3"),
        ({"updates_per_step": 0}, r"updates_per_step must be 1 or more, found 0"),
        ({"prompts_per_step": 104}, r"\"split = 'rl'\" selects 100 prompts, a step needs 104"),
        ({"steps": 0}, r"steps must be 1 or more, found 0"),
        ({"group_size": -1}, r"group_size must be 1 or more, found -1"),
        ({"temperature": 0.0}, r"temperature is 0\.0; it needs a finite number above 0.*argmax"),
        ({"temperature": float("nan")}, r"temperature is nan; it needs a finite number above 0"),
        ({"guidance": -1.0}, r"guidance is -1\.0; it needs a finite number from 0"),
        (
            {"top_p": 0.9},
            r"stage text: top_p is 0\.9; only 1 \(off\) can be trained with.*moves with the weights",
        ),
        ({"top_k": 50}, r"top_k is 50; only 0 \(off\) can be trained with"),
        ({"min_p": 0.1}, r"min_p is 0\.1; only 0 \(off\) can be trained with"),
        ({"importance_limit": 0.5}, r"importance_limit must be 1 or more, found 0\.5"),
        ({"importance_mask": 0.5}, r"importance_mask is 0\.5; it is a factor above 1"),
        ({"learning_rate": float("inf")}, r"learning_rate must be above 0, found inf"),
        ({"gamma": 1.5}, r"gamma must be from 0 to 1, found 1\.5"),
        ({"lam": -0.1}, r"lam must be from 0 to 1, found -0\.1"),
        ({"clip_low": -0.2}, r"clip_low must be 0 or more, found -0\.2"),
        ({"kl_target": 0.0}, r"kl_target must be above 0, found 0\.0"),
        ({"warmup_steps": -1}, r"warmup_steps must be 0 or more, found -1"),
        ({"learning_rate_decay": "cosin"}, r"learning_rate_decay is 'cosin'; did you mean 'cosine'\?"),
        ({"learning_rate_floor": 1.5}, r"learning_rate_floor must be from 0 to 1, found 1\.5"),
        ({"max_words": 0}, r"max_words must be 1 or more, found 0"),
        ({"critic_warmup_steps": 2, "algorithm": "grpo"}, r"trains the critic alone, and grpo has none"),
        ({"critic_warmup_steps": 3}, r"critic_warmup_steps 3 leaves none of 3 steps to the policy"),
        ({"carry": ("critics",)}, r"carry names 'critics'; did you mean 'critic'\?"),
        ({"text": ModalitySettings(kl_coef=-1.0)}, r"stage text, text: kl_coef must be 0 or more, found -1"),
        (
            {"image": ModalitySettings(entropy_target=0.0)},
            r"stage text, image: entropy_target must be above 0",
        ),
        ({"direction": "both", "prompts_per_step": 8}, r"micro_prompts 8 x 2 directions = 16"),
        ({"direction": "both", "replay_prompts": 4}, r"a stage of both trains both; set it to 0"),
        ({"plateau_evaluations": 2}, r"needs evaluations inside the stage; set evaluate_every"),
        ({"kl_budget": 0.0}, r"kl_budget must be above 0"),
        ({"success_window": (0.9, 0.1)}, r"success_window \(0\.9, 0\.1\) holds no rate"),
        ({"success_of": "likes"}, r"success_of is 'likes'; give reward, or reward/COMPONENT"),
        (
            {"curriculum": (Lesson(from_step=0, prompts="true"),)},
            r"curriculum begins at steps \[0\]; give steps from 1 on",
        ),
        ({"sampling_rounds": 2, "group_size": 1}, r"sampling_rounds 2 looks for samples .* group_size is 1"),
        ({"reference_every": -1}, r"reference_every must be 0 or more"),
        ({"name": "a/b"}, r"stage a/b: the name needs letters, digits"),
        ({"name": "start"}, r"'start' is taken by the evaluation before training"),
    ],
)
def test_a_stage_that_cannot_work(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check([replace(STAGE, **changes)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_prompts": 0}, r"settings: micro_prompts must be 1 or more, found 0"),
        ({"checkpoint_every": 0}, r"settings: checkpoint_every must be 1 or more, found 0"),
        ({"keep_checkpoints": 0}, r"settings: keep_checkpoints must be 1 or more, found 0"),
        ({"evaluate_every": -1}, r"settings: evaluate_every must be 0 or more, found -1"),
        ({"seed": -1}, r"settings: seed must be from 0 to 2\^63 - 1, found -1"),
        ({"micro_batch_tokens": -1}, r"settings: micro_batch_tokens must be 0 or more, found -1"),
        ({"logits_chunk": -1}, r"settings: logits_chunk must be 0 or more, found -1"),
        (
            {"alarms": AlarmSettings(memory_steps=3)},
            r"settings\.alarms: memory_steps must be 4 or more, found 3",
        ),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check([STAGE], replace(SETTINGS, **changes))


def test_each_modality_has_its_own_coefficients() -> None:
    stage = replace(
        STAGE, direction="both", kl_coef=0.1, image=ModalitySettings(kl_coef=0.3, loss_weight=0.5)
    )
    assert stage.directions == ("text", "image")
    assert (stage.of("text").kl_coef, stage.of("image").kl_coef) == (0.1, 0.3)
    assert (stage.loss_weight("text"), stage.loss_weight("image")) == (1.0, 0.5)
    assert STAGE.of("text") == STAGE


def test_a_modality_is_set_by_name_on_the_command_line() -> None:
    changed = replace_settings(
        STAGE, ["image.kl_coef=0.3", "carry=critic,reference", "success_window=0.1,0.9"]
    )
    assert changed.image.kl_coef == 0.3
    assert changed.carry == ("critic", "reference")
    assert changed.success_window == (0.1, 0.9)


def test_more_ranks_need_more_prompts() -> None:
    with pytest.raises(ConfigError, match=r"16 is not a multiple of 3 ranks x micro_prompts 8 = 24"):
        check([STAGE], world_size=3)


def test_everything_wrong_comes_at_once() -> None:
    stages = [replace(STAGE, steps=0, gamma=2.0), replace(STAGE, prompts_per_step=12)]
    with pytest.raises(ConfigError) as caught:
        check(stages, replace(SETTINGS, keep_checkpoints=0), rows=4)
    first, *lines = str(caught.value).splitlines()
    assert first == "this run cannot start:"
    assert len(lines) == 6
    for part in ("names repeat", "steps must", "gamma must", "keep_checkpoints", "multiple", "selects 4"):
        assert sum(part in line for line in lines) == 1, part


def test_a_run_needs_a_stage() -> None:
    with pytest.raises(ConfigError, match="there is no stage"):
        check([])
