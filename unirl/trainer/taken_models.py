"""Models of others, copied into a run, so that the run stays whole when the original goes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from unirl.errors import ConfigError
from unirl.policies.janus import JanusPolicy
from unirl.rewards.train_preference import reward_version

__all__ = ["take_model", "take_reward", "take_tokenizer"]

log = logging.getLogger("unirl.trainer.taken_models")


def take_model(model: Path, out: Path) -> None:
    """Copy an image tokenizer or a policy into the run.

    Raises:
        ConfigError: If there is no model.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model}: no config.json, so this is no model's folder")
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("%s: taken from %s", out.name.strip(".").removesuffix(".partial"), model)


def take_tokenizer(model: Path, out: Path) -> None:
    """Take an image tokenizer into the run: its folder, or the one inside of a Janus.

    Raises:
        ConfigError: If there is no model.
    """
    config = model / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("model_type") == "janus":
        JanusPolicy.load(model).image_tokenizer().save(out)
        log.info("tokenizer: that of the Janus in %s", model)
    else:
        take_model(model, out)


def take_reward(model: Path, out: Path) -> None:
    """Copy a reward model into the run.

    Raises:
        ConfigError: If there is no reward model.
    """
    version = reward_version(model)
    shutil.copytree(model, out, dirs_exist_ok=True)
    log.info("reward model: version %d from %s", version, model)
