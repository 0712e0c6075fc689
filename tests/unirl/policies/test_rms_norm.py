from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unirl.policies.rms_norm import RMSNorm, _Norm, take_over_norms

from transformers.models.llama.modeling_llama import LlamaRMSNorm  # isort: skip  after unirl
from transformers.models.mistral.modeling_mistral import MistralRMSNorm  # isort: skip
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm  # isort: skip
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # isort: skip


def norm_of(kind: type[nn.Module], width: int = 24) -> nn.Module:
    norm = kind(width, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator().manual_seed(0))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm])
def test_it_is_the_norm_of_transformers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Values to the bit, gradients to rounding, also where other inputs meet float32 weights."""
    theirs = norm_of(kind)
    ours = nn.Sequential(theirs)
    take_over_norms(ours)
    assert isinstance(ours[0], RMSNorm) and ours[0].weight is theirs.weight
    found = []
    for norm in (theirs, ours):
        hidden = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        theirs.weight.grad = None
        output = norm(hidden)
        output.backward(torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(2)).to(output.dtype))
        found.append((output, hidden.grad, theirs.weight.grad))
    assert found[0][0].equal(found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def test_the_written_gradient_is_the_numerical_one() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(7, generator=generator, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *inputs: _Norm.apply(*inputs, 1e-5), (hidden, weight))
    weight.requires_grad_(False)
    _Norm.apply(hidden, weight, 1e-5).sum().backward()
    assert weight.grad is None


def test_a_policy_keeps_the_names_of_its_weights(toy: SimpleNamespace) -> None:
    policy = toy.make_policy()
    kinds = [type(module) for module in policy.lm.modules() if "Norm" in type(module).__name__]
    assert set(kinds) == {RMSNorm}
    assert {"model.norm.weight", "model.layers.0.input_layernorm.weight"} <= policy.lm.state_dict().keys()
