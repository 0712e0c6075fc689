"""Read a policy from a directory, whichever class it is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from unirl.errors import ConfigError
from unirl.policies.janus import JanusPolicy
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM

__all__ = ["load_policy"]

CLASSES: dict[str, type[Policy]] = {"janus": JanusPolicy}


def load_policy(
    directory: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> Policy:
    """Load the class that the checkpoint's `model_type` names: Janus, else a `TokenLM`.

    Raises:
        ConfigError: If the directory holds no model of transformers, or no image grid, or a damaged file.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: no config.json, so this is no model of transformers")
    try:
        kind = json.loads(path.read_text()).get("model_type")
        return CLASSES.get(kind, TokenLM).load(directory, dtype=dtype, attention=attention)
    except (json.JSONDecodeError, SafetensorError) as error:
        raise ConfigError(
            f"{directory}: a file of the model is cut short or damaged ({error}); put it back, or move the "
            "folder away and let it be made again"
        ) from error
