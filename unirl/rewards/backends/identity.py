"""Names for models that change with their weights."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from unirl.errors import ConfigError

__all__ = ["directory_identity", "network_identity"]

_CHUNK_BYTES = 1 << 24


def directory_identity(directory: Path) -> str:
    """Hash of every file of a model directory that decides its answers: weights, configuration, tokenizer.

    Raises:
        ConfigError: If the directory holds no weights.
    """
    files = sorted(path for path in directory.glob("*") if path.suffix in (".safetensors", ".json", ".jinja"))
    if not any(path.suffix == ".safetensors" for path in files):
        raise ConfigError(f"{directory}: no *.safetensors here, wanted the directory of a model")
    digest = xxhash.xxh3_128()
    for path in files:
        if path.name == "reward.json":
            continue  # the question is no part of the model
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def network_identity(network: torch.nn.Module) -> str:
    """Hash of the names and weights of a network in memory."""
    digest = xxhash.xxh3_128()
    for name, weight in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return str(digest.hexdigest())
