"""One rank of a policy that FSDP2 shards: gathers the weights for an engine and compares them with the whole.

Started by `torch.distributed.run`; argument: path of `tests/toy.py`.
"""

from __future__ import annotations

import runpy
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unirl.policies.adapters import add_adapters
from unirl.rollout.weight_sync import buckets


def main() -> None:
    """Shard layer by layer, tied or LoRA layers included, and gather in small buckets."""
    toy = runpy.run_path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    for lora_rank in (0, 2):
        whole, sharded = toy["make_policy"](seed=4), toy["make_policy"](seed=4)
        for policy in (whole, sharded):
            if lora_rank:
                add_adapters(policy.lm, rank=lora_rank, seed=0)
                perturb_adapters(policy)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in sharded.lm.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded.lm, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in sharded.lm.parameters())
        expected = dict(whole.weights())
        found = {
            name: tensor
            for bucket in buckets(sharded.weights(), dtype=torch.float32, bucket_bytes=10_000)
            for name, tensor in bucket.weights
        }
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for name, tensor in found.items():
            assert not isinstance(tensor, DTensor)
            torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-6, rtol=0)
    torch.distributed.destroy_process_group()


def perturb_adapters(policy: nn.Module) -> None:
    """A fresh adapter is the identity, which would hide that it was not merged."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


if __name__ == "__main__":
    main()
