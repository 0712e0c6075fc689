"""LoRA adapters inside a model of transformers, by peft.

The adapters go into the model's own layers, so its class, its caches and its forward pass stay what they
were; switched off, the layers give exactly what they gave before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from unirl.errors import ConfigError
from unirl.policies.sharded_tensors import whole

__all__ = ["adapters_off", "add_adapters", "has_adapters", "load_adapters", "merged_weights", "save_adapters"]

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


def add_adapters(lm: PreTrainedModel, *, rank: int, alpha: float | None = None, seed: int = 0) -> None:
    """Put LoRA adapters into every linear layer of a model's decoder; everything else is frozen.

    Embeddings, heads and the encoders of pictures get none.

        y = W x + (alpha / rank) B A x,   B = 0 at the start

    Args:
        lm: Changed in place. With fresh adapters it computes what it did before.
        rank: Rows of A, above 0.
        alpha: Scale; twice the rank if None.
        seed: Decides A.

    Raises:
        ConfigError: If peft is not installed, the rank is not above 0, or there are adapters already.
    """
    if rank < 1:
        raise ConfigError(f"lora rank must be 1 or more, found {rank}")
    decoder = lm.get_decoder()
    prefix = next(name for name, module in lm.named_modules() if module is decoder)
    linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    leaves = "|".join(sorted({name.rpartition(".")[2] for name in linear}))
    config = _peft().LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
        target_modules=rf"{re.escape(prefix)}\..*\.({leaves})",
    )
    _inject(lm, config, seed)


def has_adapters(lm: nn.Module) -> bool:
    """Whether any layer of the model has an adapter."""
    return bool(_adapted(lm))


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Within it the model is its base: the adapters add nothing."""
    layers = _adapted(lm).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the model as if it never had adapters, with their change added to its weights.

    A tied head comes a second time under its own name, as in `state_dict`. Sharded tensors are gathered one
    at a time, so every rank must go through the iterator.
    """
    adapted = _adapted(lm)
    for key, value in lm.state_dict().items():
        owner, _, leaf = key.rpartition(".")
        if any(f".{part}." in f".{owner}." for part in ("lora_A", "lora_B")):
            continue
        name = owner.removesuffix(".base_layer")
        tensor = whole(value)
        if name != owner and name in adapted and leaf == "weight":
            tensor = tensor + whole(adapted[name].get_delta_weight(ADAPTER)).to(tensor.dtype)
        yield f"{name}.{leaf}" if name else leaf, tensor.detach()


def save_adapters(lm: PreTrainedModel, directory: Path, *, is_writer: bool = True) -> None:
    """Write the adapters alone, as peft does, for `load_adapters` or `peft.PeftModel.from_pretrained`.

    Args:
        lm: Has adapters.
        directory: Made if it is not there.
        is_writer: False on ranks that only help to gather sharded weights.
    """
    if not has_adapters(lm):
        raise ConfigError(f"{directory}: the model has no adapters to save; add them first")
    tensors = {
        PEFT_PREFIX + key.replace(f".{ADAPTER}.", "."): whole(value).contiguous()
        for key, value in lm.state_dict().items()
        if ".lora_A." in key or ".lora_B." in key
    }
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
        lm.peft_config[ADAPTER].save_pretrained(str(directory))
        save_file(tensors, directory / WEIGHTS_FILE)


def load_adapters(lm: PreTrainedModel, directory: Path) -> None:
    """Put what `save_adapters` wrote into the model that it was made on.

    Raises:
        ConfigError: If there are no adapters in the directory, or they belong to another model.
    """
    if not (directory / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{directory}: no {WEIGHTS_FILE}, so there are no adapters to load")
    _inject(lm, _peft().LoraConfig.from_pretrained(str(directory)), seed=0)
    tensors = {
        key.removeprefix(PEFT_PREFIX)
        .replace(".lora_A.", f".lora_A.{ADAPTER}.")
        .replace(".lora_B.", f".lora_B.{ADAPTER}."): value
        for key, value in load_file(directory / WEIGHTS_FILE).items()
    }
    own = {key: value for key, value in lm.state_dict().items() if ".lora_A." in key or ".lora_B." in key}
    wrong = sorted(
        key
        for key in own.keys() | tensors.keys()
        if key not in own or key not in tensors or own[key].shape != tensors[key].shape
    )
    if wrong:
        raise ConfigError(
            f"{directory}: these adapters belong to another model, {wrong[0]} does not fit; "
            "load them on the model that they were trained on"
        )
    lm.load_state_dict(tensors, strict=False)


def _inject(lm: PreTrainedModel, config: Any, seed: int) -> None:
    if has_adapters(lm):
        raise ConfigError("the model has LoRA adapters already; save it merged and load it to start new ones")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _peft().inject_adapter_in_model(config, lm, adapter_name=ADAPTER)
    lm.peft_config = {ADAPTER: config}


def _adapted(lm: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by the name that they had without it."""
    return {name: module for name, module in lm.named_modules() if hasattr(module, "get_delta_weight")}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs peft, which is not installed; install unirl[lora]") from error
    return peft
