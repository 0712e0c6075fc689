"""From a policy to what the loop trains: spread over ranks, wrapped for its precision, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from unirl.errors import ConfigError
from unirl.policies.critic import OwnCritic
from unirl.policies.policy import Policy, PolicyOutput
from unirl.policies.reference import BaseReference, reference_of
from unirl.trainer.distribution import Distribution
from unirl.trainer.optimizer import make_optimizer
from unirl.types import CriticKind

__all__ = ["Prepared", "open_accelerator", "prepare_policy", "reference_on_device", "shard"]

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Prepared(NamedTuple):
    """What the loop works with."""

    model: nn.Module
    """The policy for forward passes with a gradient: itself, or inside DDP."""
    optimizer: AcceleratedOptimizer
    """AdamW with two groups, the actor's parameters and the critic's; learning rates 0."""
    reference: Policy
    """The policy as it was, frozen."""


def open_accelerator(distribution: Distribution) -> Accelerator:
    """Make the Accelerator that a run asks for; it starts the process group of a launched program.

    Raises:
        ConfigError: If this machine cannot do what is asked.
    """
    on_cpu = not torch.accelerator.is_available()
    plugin = None
    if distribution.sharding == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(
        # Without it, launched CPU processes would not know of each other.
        cpu=on_cpu,
        mixed_precision=distribution.mixed_precision,
        fsdp_plugin=None if on_cpu else plugin,
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate turns FSDP on for GPUs only; FSDP2 itself runs on gloo.
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    require_fit(accelerator, distribution)
    return accelerator


def require_fit(accelerator: Accelerator, distribution: Distribution) -> None:
    """Refuse an Accelerator that would do something else than the settings say.

    Raises:
        ConfigError: With what differs and how to make them agree.
    """
    wrong = []
    if accelerator.mixed_precision != distribution.mixed_precision:
        wrong.append(
            f"mixed_precision is {distribution.mixed_precision!r} in the settings and "
            f"{accelerator.mixed_precision!r} in the launch"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        wrong.append("fp16 with its scaled loss needs a GPU, and this is a CPU; take bf16 or no")
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and not accelerator.is_fsdp2:
        wrong.append("the launch asks for FSDP of version 1; only version 2 is supported")
    if sharded != (distribution.sharding == "fsdp2") and accelerator.num_processes > 1:
        wrong.append(
            f"sharding is {distribution.sharding!r} in the settings, and the Accelerator is of type "
            f"{accelerator.distributed_type.value}"
        )
    sizes = accelerator.parallelism_config
    for name in ("tp", "cp", "sp"):
        if sizes is not None and getattr(sizes, f"{name}_size") > 1:
            wrong.append(
                f"the launch asks for {name}_size {getattr(sizes, f'{name}_size')}; ranks here always hold "
                "different samples, so tensor, context and sequence parallel groups are not supported"
            )
    if wrong:
        raise ConfigError(
            "settings.distribution and the Accelerator do not agree:\n  "
            + "\n  ".join(wrong)
            + "\nset settings.distribution and launch without such options, or give what "
            "unirl.trainer.sharding.open_accelerator makes"
        )


def prepare_policy(
    accelerator: Accelerator, distribution: Distribution, policy: Policy, *, critic: CriticKind = "shared"
) -> Prepared:
    """Take the reference, spread policy and reference over the ranks, and make the optimizer.

    Args:
        accelerator: Of `open_accelerator`, or one that agrees with the settings.
        distribution: What the settings say.
        policy: Changed in place: moved to the device and, with FSDP2, sharded.
        critic: Which one the policy is to have.

    Raises:
        ConfigError: If accelerator and settings do not agree.
    """
    require_fit(accelerator, distribution)
    reference = reference_of(policy)
    policy.take_critic(critic)
    if distribution.checkpoint_activations:
        checkpoint_layers(policy)
    if accelerator.is_fsdp2:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        shard(policy, mesh, distribution)
        if not isinstance(reference, BaseReference):
            shard(reference, mesh, distribution, offload=distribution.offload_reference)
        return Prepared(policy, accelerator.prepare_optimizer(make_optimizer(policy)), reference)
    if accelerator.num_processes > 1 and policy.sometimes():
        policy.register_forward_hook(_touch)
    model, optimizer = accelerator.prepare(policy, make_optimizer(policy))
    if distribution.mixed_precision != "no" and not isinstance(reference, BaseReference):
        reference = accelerator.prepare_model(reference, device_placement=False, evaluation_mode=True)
    if not distribution.offload_reference:
        reference.to(accelerator.device)
    return Prepared(model, optimizer, reference)


def shard(policy: Policy, mesh: DeviceMesh, distribution: Distribution, *, offload: bool = False) -> None:
    """Cut every parameter of a policy into one part a rank, in place.

    One group for each decoder layer, one for the critic's head, which computes in its own precision, and one
    for the rest, so that a tied embedding and head stay one tensor. What runs on some ranks only, such as the
    encoder of pictures, is in the last one, which every rank gathers in every pass. Every rank keeps all of
    what `Policy.apart` names.

    Args:
        policy: Its name of every parameter stays.
        mesh: 1-D.
        distribution: Says in which precision.
        offload: Keep the parts in the host's memory.
    """
    dtype = DTYPES[distribution.mixed_precision]
    if dtype is not None:
        for parameter in (*policy.trained_parameters(), *policy.critic_parameters()):
            parameter.data = parameter.data.float()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    placement = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    apart = {p for module in policy.apart() for p in module.to(mesh.device_type).parameters()}
    group = partial(
        fully_shard, mesh=mesh, reshard_after_forward=True, offload_policy=placement, ignored_params=apart
    )
    for layer in decoder_layers(policy):
        group(layer, mp_policy=precision)
    if isinstance(policy.critic, OwnCritic):
        group(policy.critic.trunk, mp_policy=precision)
    group(policy.critic)
    # A rank that saw no picture sends zeros for what it did not use; the others would wait for it for ever.
    group(policy, mp_policy=precision).set_reduce_scatter_unused_params(True)


def decoder_layers(policy: Policy) -> list[nn.Module]:
    """The layers of the policy's decoder, first to last, and then those of a critic's own.

    Raises:
        ConfigError: If they cannot be told.
    """
    number = policy.decoder_config.num_hidden_layers
    trunks = [policy.trunk, *([policy.critic.trunk] if isinstance(policy.critic, OwnCritic) else [])]
    lists = [
        next((m for m in trunk.modules() if isinstance(m, nn.ModuleList) and len(m) == number), None)
        for trunk in trunks
    ]
    layers = [layer for found in lists if found is not None for layer in found]
    if len(layers) == number * len(trunks):
        return layers
    raise ConfigError(
        f"{type(policy.lm).__name__}: no list of {number} layers is in its decoder, so it cannot be sharded "
        "or checkpointed by layers; use sharding=none and checkpoint_activations=false"
    )


def checkpoint_layers(policy: Policy) -> None:
    """Let every decoder layer keep only its input for the backward pass and compute the rest again."""
    for layer in decoder_layers(policy):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def reference_on_device(
    accelerator: Accelerator, distribution: Distribution, reference: Policy
) -> Iterator[None]:
    """Within it, a reference that is kept in the host's memory is on the device. FSDP2 does so by layers."""
    moves = distribution.offload_reference and not accelerator.is_fsdp2
    if moves:
        reference.to(accelerator.device)
    yield
    if moves:
        reference.to("cpu")


def _touch(policy: nn.Module, _inputs: object, output: PolicyOutput) -> PolicyOutput:
    """Give what a pass left out a gradient of 0; DDP waits for a gradient of every parameter."""
    if not (torch.is_grad_enabled() and isinstance(policy, Policy)):
        return output
    nothing = sum((parameter.sum() for parameter in policy.sometimes()), output.values.new_zeros(()))
    return replace(output, values=output.values + 0.0 * nothing)
