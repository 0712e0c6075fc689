"""One rank that saves a policy which FSDP2 shards, or goes on from what other ranks saved.

Started by `torch.distributed.run`; arguments: path of `tests/toy.py`, folder, `save` or `load`.
"""

from __future__ import annotations

import json
import logging
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from unirl.trainer.preemption import StopRequest
from unirl.trainer.stages import RunSettings
from unirl.trainer.state_keeper import StateKeeper
from unirl.trainer.tensor_pieces import model_tensors, optimizer_tensors

STEP = 3


def main() -> None:
    """Save after a few updates, or load and compare; say which numbers the generators give next."""
    toy, directory, is_saving = runpy.run_path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "save"
    logging.basicConfig(level=logging.WARNING)
    accelerator = Accelerator(cpu=True)
    policy = toy["make_policy"](seed=4 if is_saving else 9)
    if accelerator.num_processes > 1:
        shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    keeper = StateKeeper(
        directory,
        RunSettings(),
        model=policy,
        optimizer=optimizer,
        accelerator=accelerator,
        stop=StopRequest(),
        state=lambda: {"position": {"step": STEP, "is_evaluation_due": False}},
        on_error=lambda error: sys.exit(f"error: {error}"),
    )
    if is_saving:
        update(policy, optimizer)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(accelerator.process_index)
        policy.lm.model.layers[0].requires_grad_(False)
        keeper.save(step=STEP)
        keeper.finish()
    else:
        policy.lm.model.layers[0].requires_grad_(False)
        keeper.resume()
        keeper.start()
    numbers = [float(torch.rand(1)), float(np.random.rand()), random.random()]
    whole = whole_tensors(policy, optimizer)
    if accelerator.is_main_process and is_saving:
        save_file(whole, directory / "expected.safetensors")
    elif accelerator.is_main_process:
        expected = load_file(directory / "expected.safetensors")
        assert whole.keys() == expected.keys(), whole.keys() ^ expected.keys()
        for name, value in whole.items():
            assert value.equal(expected[name]), name
    sys.stdout.write(json.dumps({"rank": accelerator.process_index, "numbers": numbers}) + "\n")
    sys.stdout.flush()
    keeper.close()
    accelerator.end_training()


def shard(policy: nn.Module) -> None:
    """Layer by layer; the critic stays whole on every rank."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in policy.lm.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy.lm, mesh=mesh)


def update(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Updates by random gradients, the same at any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEP):
        for parameter in policy.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole_tensors(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that was saved, gathered on every rank."""
    tensors = {**model_tensors(policy), **optimizer_tensors(policy, optimizer)}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()
        for name, value in tensors.items()
    }


if __name__ == "__main__":
    main()
