"""Sizes of a policy that is not loaded: whether words and pictures fit it, and what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from storage import StorageError, View
from unirl.errors import ConfigError
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.trainer.memory_estimate import ModelShape, estimate_memory, lora_parameters, stage_plan
from unirl.trainer.recipe import Recipe, model_path
from unirl.types import Direction

__all__ = ["PolicySizes", "caption_problems", "memory_parts", "policy_sizes", "require_words"]

SPECIALS_AROUND_PICTURE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """What is known of a policy without its weights."""

    vocabulary: JointVocabulary
    positions: int
    shape: ModelShape
    parameters: Mapping[str, int]
    """By part; the critic of a model that is only named is not counted."""

    def response_length(self, direction: Direction, max_words: int) -> int:
        """T, as `Policy.max_response_length`."""
        return self.vocabulary.grid.response_length if direction == "image" else max_words + 1

    def shown_length(self, recipe: Recipe) -> int:
        """Ids of what a prompt shows that is answered with text: a picture, or the frames of a clip."""
        num_pictures = 1 if recipe.clip is None else recipe.clip.num_frames
        return num_pictures * (self.vocabulary.grid.response_length + SPECIALS_AROUND_PICTURE)

    def longest_caption(self, captions: Sequence[str]) -> tuple[str, int]:
        """The caption of most ids, and how many."""
        lengths = {text: len(self.vocabulary.words(text)) for text in captions}
        longest = max(lengths, key=lambda text: lengths[text], default="")
        return longest, lengths.get(longest, 0)


def policy_sizes(recipe: Recipe, run: Path, problems: list[str], notes: list[str]) -> PolicySizes | None:
    """Sizes of the policy that the recipe makes, or of the one that it names; None where they are not known.

    Args:
        recipe: With its settings.
        run: The run's directory, in which models may be made.
        problems: Is added to, where there can be no such policy.
        notes: Is added to, where its sizes come to be known only when the run starts.
    """
    folder = run / "models" / "sft"
    if not folder.is_dir():
        if recipe.sft.model is None:
            return _made_sizes(recipe, problems)
        folder = model_path(recipe.sft.model, run / "models")
    if not (folder / "config.json").is_file():
        notes.append("the policy is not there yet, so its sizes and memory are not known")
        return None
    if recipe.tokenizer.model is None and not folder.is_relative_to(run):
        notes.append(
            "sft.model is named and tokenizer.model is not: an image tokenizer is trained, whose codes mean "
            "other pictures than those that the policy knows; name the one that the policy was made with"
        )
    try:
        return _named_sizes(folder)
    except (ConfigError, ValueError) as error:  # transformers raises ValueError for a class it does not know
        problems.append(f"sft.model: {error}")
        return None


def _made_sizes(recipe: Recipe, problems: list[str]) -> PolicySizes | None:
    """Of a policy that starts from random weights, counted on the meta device."""
    config, size = recipe.tokenizer.config, recipe.sft.config
    try:
        vocabulary = JointVocabulary.from_captions(
            recipe.data.captions(),
            num_codes=config.num_codes,
            rows=config.grid_size,
            columns=config.grid_size,
        )
        with torch.device("meta"):
            policy = TokenLM.create(size, vocabulary, seed=0)
            policy.take_critic(recipe.settings.critic)
    except (ConfigError, StorageError) as error:
        problems.append(str(error))
        return None
    except ValueError as error:  # transformers refuses sizes that do not go together
        problems.append(f"sft.config: {error}")
        return None
    num_parameters = sum(p.numel() for p in policy.lm.parameters())
    return PolicySizes(
        vocabulary=vocabulary,
        positions=size.max_length,
        shape=ModelShape.of(policy.decoder_config, num_parameters=num_parameters),
        parameters={"policy": num_parameters, "critic": sum(p.numel() for p in policy.critic.parameters())},
    )


def _named_sizes(folder: Path) -> PolicySizes:
    config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    shape = ModelShape.of(config)
    return PolicySizes(
        vocabulary=JointVocabulary.load(folder),
        positions=int(config.get_text_config().max_position_embeddings),
        shape=shape,
        parameters={"policy": shape.num_parameters},
    )


def caption_problems(
    recipe: Recipe, sizes: PolicySizes, captions: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What does not fit the policy's positions or its vocabulary, and what is cut."""
    problems, notes = [], []
    longest, num_words = sizes.longest_caption(captions)
    picture = sizes.vocabulary.grid.response_length + SPECIALS_AROUND_PICTURE
    shown = sizes.shown_length(recipe)
    for stage in recipe.stages:
        needed = max(
            1 + (picture + num_words if direction == "image" else shown + stage.max_words + 1)
            for direction in stage.directions
        )
        if needed > sizes.positions:
            problems.append(
                f"stage {stage.name}: prompt and response take {needed} positions, the policy has "
                f"{sizes.positions}; raise sft.config.max_length to {needed} or more, or leave long "
                "captions out"
            )
        if "text" in stage.directions and num_words > stage.max_words:
            notes.append(
                f"stage {stage.name}: the longest caption has {num_words} words, answers are cut at "
                f"max_words {stage.max_words}"
            )
    if 1 + shown + num_words + 1 > sizes.positions:
        problems.append(
            f"the longest caption has {num_words} words, with its picture {shown + num_words + 2} positions, "
            f"the policy has {sizes.positions}: {longest[:60]!r}; raise sft.config.max_length or leave it out"
        )
    problems += _lacking_words(recipe, sizes.vocabulary, captions)
    return problems, notes


def require_words(recipe: Recipe, vocabulary: JointVocabulary, views: Sequence[View]) -> None:
    """Refuse captions with words that a named policy does not know, before it trains on anything.

    Raises:
        ConfigError: With their number and the first.
    """
    if vocabulary.tokenizer.unk_token_id is None:
        return
    captions = {text for view in views for text in view.column("caption").to_pylist() if text}
    problems = _lacking_words(recipe, vocabulary, sorted(captions))
    if problems:
        raise ConfigError(problems[0])


def _lacking_words(recipe: Recipe, vocabulary: JointVocabulary, captions: Sequence[str]) -> list[str]:
    unknown = vocabulary.tokenizer.unk_token_id
    lacking = [text for text in captions if unknown in vocabulary.words(text)]
    if not lacking:
        return []
    remedy = (
        "the recipe's captions() must hold every word"
        if recipe.sft.model is None
        else f"teach the policy of sft.model {recipe.sft.model} these words, name another, or leave such "
        "captions out by the conditions"
    )
    return [
        f"{len(lacking)} captions have words that the vocabulary lacks, first {lacking[0][:60]!r}; {remedy}"
    ]


def memory_parts(
    recipe: Recipe, sizes: PolicySizes, captions: Sequence[str], *, world_size: int
) -> Mapping[str, int]:
    """The estimate of the stage that takes most, as `MemoryEstimate.parts` names it."""
    _, num_words = sizes.longest_caption(captions)
    adapters = lora_parameters(sizes.shape, recipe.lora_rank) if recipe.lora_rank else None
    estimates = [
        estimate_memory(
            sizes.shape,
            stage_plan(
                stage,
                recipe.settings,
                prompt_length=1 + (num_words + 1 if direction == "image" else sizes.shown_length(recipe)),
                response_length=sizes.response_length(direction, stage.max_words),
                ranks=world_size if recipe.settings.distribution.sharding == "fsdp2" else 1,
                trained_parameters=adapters,
            ),
        )
        for stage in recipe.stages
        for direction in stage.directions
    ]
    return max(estimates, key=lambda estimate: estimate.peak).parts() if estimates else {}
