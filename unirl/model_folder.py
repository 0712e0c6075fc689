"""Is a folder that was named a model's, and of which kind? Asked before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.errors import ConfigError

__all__ = ["IMAGE_TOKENIZER", "QWEN_VL", "model_type", "require_model"]

IMAGE_TOKENIZER = "janus_vqgan"
QWEN_VL = "qwen2_5_vl"
WANTED = {
    IMAGE_TOKENIZER: "an image tokenizer (`unirl tokenizer train` writes one)",
    QWEN_VL: "a Qwen2.5-VL (`unirl reward train` writes one)",
}


def model_type(folder: Path) -> str:
    """What `config.json` calls the model, such as "llama".

    Raises:
        ConfigError: If there is no folder, no `config.json` in it, or none of a model.
    """
    if not folder.exists():
        raise ConfigError(
            f"{folder}: there is no such folder; models are read from folders of transformers, none is "
            "fetched by its name"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: no config.json, so this is no model's folder") from None
    except ValueError as error:
        raise ConfigError(f"{folder}/config.json: cannot be read ({error}); put the file back") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{folder}/config.json: names no model_type; name a folder of transformers")
    return kind


def require_model(folder: Path, *kinds: str) -> None:
    """Refuse a folder without a model, or with one of another type: transformers would fill that one with
    random weights.

    Raises:
        ConfigError: If the model's type is none of `kinds`.
    """
    found = model_type(folder)
    if found not in kinds:
        wanted = " or ".join(WANTED.get(kind, f"a model of type {kind!r}") for kind in kinds)
        raise ConfigError(f"{folder}: holds a model of type {found!r}, wanted {wanted}")
