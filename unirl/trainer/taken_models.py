"""Models of others, copied into a run, so that the run stays whole when the original goes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from unirl.model_folder import IMAGE_TOKENIZER, model_type, require_model
from unirl.policies.janus import JanusPolicy
from unirl.rewards.train_preference import reward_version

__all__ = ["take_model", "take_reward", "take_tokenizer"]

log = logging.getLogger("unirl.trainer.taken_models")


def take_model(model: Path, out: Path) -> None:
    """Copy an image tokenizer or a policy into the run.

    Raises:
        ConfigError: If there is no model.
    """
    model_type(model)
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("%s: taken from %s", out.name.strip(".").removesuffix(".partial"), model)


def take_tokenizer(model: Path, out: Path) -> None:
    """Take an image tokenizer into the run: its folder, or the one inside of a Janus.

    Raises:
        ConfigError: If there is no model.
    """
    if model_type(model) == "janus":
        JanusPolicy.load(model).image_tokenizer().save(out)
        log.info("tokenizer: that of the Janus in %s", model)
    else:
        require_model(model, IMAGE_TOKENIZER)
        take_model(model, out)


def take_reward(model: Path, out: Path) -> None:
    """Copy a reward model into the run.

    Raises:
        ConfigError: If there is no reward model.
    """
    version = reward_version(model)
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("reward model: version %d from %s", version, model)
