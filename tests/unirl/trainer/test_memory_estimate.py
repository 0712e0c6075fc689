"""The formulas of memory, against counted parameters, kept tensors and numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from unirl.policies.adapters import add_adapters
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.trainer.distribution import Distribution
from unirl.trainer.memory_estimate import (
    ADAM_BYTES,
    SAVED_LOGITS_BYTES,
    ModelShape,
    TrainingPlan,
    estimate_memory,
    lora_parameters,
    serving_bytes,
    stage_plan,
)
from unirl.trainer.stages import RunSettings, Stage

LLAMA_7B = ModelShape(
    num_parameters=6_738_415_616,
    num_layers=32,
    width=4096,
    query_width=4096,
    key_width=4096,
    mlp_width=11008,
    vocabulary=32000,
)


def small_llama(layers: int = 2, **changed: int) -> LlamaConfig:
    vocabulary = JointVocabulary.from_captions(["a b c"], num_codes=500, rows=4, columns=4)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "head_dim": 16}
    return LlamaConfig(
        vocab_size=vocabulary.size,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
        **{**sizes, "num_key_value_heads": 2, **changed},
    )


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_those_of_the_classes() -> None:
    assert ModelShape.of(LlamaConfig(tie_word_embeddings=False)) == LLAMA_7B
    assert ModelShape.of(small_llama()).num_parameters == count(LlamaForCausalLM(small_llama()))
    qwen = Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    biases = 3 * (64 + 2 * 32)
    assert ModelShape.of(qwen).num_parameters == count(Qwen2ForCausalLM(qwen)) - biases
    assert ModelShape.of(qwen, num_parameters=7).num_parameters == 7


def test_adapters_are_counted_as_peft_makes_them() -> None:
    lm = LlamaForCausalLM(small_llama())
    add_adapters(lm, rank=4)
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    assert lora_parameters(ModelShape.of(small_llama()), 4) == trained


def kept_bytes(*, layers: int, rows: int, prompt: int, response: int) -> int:
    """What autograd keeps of a forward pass, without the weights themselves."""
    vocabulary = JointVocabulary.from_captions(["a b c"], num_codes=500, rows=4, columns=4)
    policy = TokenLM(LlamaForCausalLM(small_llama(layers)), vocabulary)
    policy.masks_text.fill_(True)  # so that no logit is left out
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.ones((rows, prompt + response), dtype=torch.int64)
        output = policy(ids, ids.bool(), prompt_length=prompt, direction="text")
    assert output.logprobs.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_activations_and_logits_are_what_autograd_keeps() -> None:
    sizes = {"rows": 3, "prompt": 7, "response": 16}
    shape, tokens = ModelShape.of(small_llama()), 3 * (7 + 16)
    one, three = kept_bytes(layers=1, **sizes), kept_bytes(layers=3, **sizes)
    assert (three - one) / 2 / tokens == pytest.approx(shape.layer_activation_bytes(4), rel=0.01)
    longer = kept_bytes(layers=1, rows=3, prompt=3, response=20)
    critic = 4 * 6 * shape.width
    assert (longer - one) / 3 / 4 == pytest.approx(SAVED_LOGITS_BYTES * shape.vocabulary + critic, rel=0.01)


def test_a_7b_model_on_eight_ranks_by_hand() -> None:
    plan = TrainingPlan(
        rows=8, rollout_rows=64, scored_rows=64, prompt_length=24, response_length=1000, ranks=8,
        compute_bytes=2, is_checkpointed=True, engine_bytes=0,
    )  # fmt: skip
    estimate = estimate_memory(LLAMA_7B, plan)
    a_number_each = 6_738_415_616 // 8
    assert estimate.weights == estimate.gradients == estimate.reference == 4 * a_number_each
    assert estimate.optimizer == ADAM_BYTES * a_number_each
    layer = 16 * 4096 + 2 * (4 * 4096 + 4 * 11008)
    assert estimate.activations == 8 * 1024 * (32 * 4096 * 2 + layer)
    assert estimate.logits == 8 * 1000 * 32000 * 21
    assert estimate.scoring == 64 * 1000 * 32000 * 17
    assert estimate.cache == estimate.engine == 0
    outside = 2 * 32000 * 4096 + 4096
    assert estimate.gathered == 2 * outside + 8 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert estimate.parts()["peak"] == estimate.peak == max(estimate.update, estimate.rollout)


def test_adapters_need_no_second_model_and_little_optimizer() -> None:
    plan = TrainingPlan(rows=1, rollout_rows=1, scored_rows=1, prompt_length=1, response_length=1)
    trained = lora_parameters(LLAMA_7B, 16)
    adapted = estimate_memory(
        LLAMA_7B,
        TrainingPlan(
            rows=1,
            rollout_rows=1,
            scored_rows=1,
            prompt_length=1,
            response_length=1,
            trained_parameters=trained,
        ),
    )
    assert adapted.reference == 0
    assert adapted.optimizer == 8 * trained < estimate_memory(LLAMA_7B, plan).optimizer / 100


def test_a_critic_with_a_trunk_of_its_own_by_hand() -> None:
    """Layers of 100 (2 x 100 + 2 x 100 + 3 x 200 + 2) parameters; 3 rows of 10 tokens through both trunks."""
    shape = ModelShape(
        num_parameters=1_000_000,
        num_layers=2,
        width=100,
        query_width=100,
        key_width=100,
        mlp_width=200,
        vocabulary=50,
    )
    plan = TrainingPlan(rows=3, rollout_rows=3, scored_rows=3, prompt_length=6, response_length=4)
    shared, own = (estimate_memory(shape, replace(plan, has_own_critic=kind)) for kind in (False, True))
    assert own.weights - shared.weights == own.gradients - shared.gradients == 4 * 2 * 100_200
    assert own.optimizer - shared.optimizer == ADAM_BYTES * 2 * 100_200
    assert own.activations == 2 * shared.activations and own.reference == shared.reference
    adapters = replace(plan, has_own_critic=True, trained_parameters=500)
    assert estimate_memory(shape, adapters).gradients == 4 * 2 * 500
    stage = Stage(name="s", direction="text", prompts="true", steps=1)
    assert stage_plan(stage, RunSettings(critic="own"), prompt_length=1, response_length=1).has_own_critic


def test_a_stage_says_how_many_rows_are_in_flight() -> None:
    stage = Stage(name="image", direction="image", prompts="true", steps=1, group_size=4, guidance=3.0)
    plan = stage_plan(stage, RunSettings(rollout="vllm"), prompt_length=5, response_length=64, ranks=2)
    assert (plan.rows, plan.rollout_rows, plan.is_guided, plan.engine_bytes) == (16, 32, True, 0)
    assert stage_plan(stage, RunSettings(), prompt_length=5, response_length=64).engine_bytes == 4
    spread = Distribution(mixed_precision="bf16", checkpoint_activations=True, offload_reference=True)
    settings = RunSettings(micro_batch_tokens=700, logits_chunk=256, distribution=spread)
    packed = stage_plan(stage, settings, prompt_length=5, response_length=64)
    assert (packed.rows, packed.scored_rows, packed.rollout_rows) == (10, 10, 32)
    assert (packed.compute_bytes, packed.is_checkpointed, packed.logits_chunk) == (2, True, 256)
    assert estimate_memory(LLAMA_7B, packed).reference == 0


def test_serving_splits_weights_and_cache() -> None:
    whole = 2 * LLAMA_7B.num_parameters + 2 * 32 * 4096 * 1000 * 2
    assert serving_bytes(LLAMA_7B, tokens=1000) == whole
    assert serving_bytes(LLAMA_7B, tokens=1000, gpus=2) == whole // 2


SCALING = Path(__file__).parents[3] / "docs" / "scaling.md"


def shape(
    layers: int, width: int, heads: int, kv: int, mlp: int, *, ids: int, head: int, tied: bool
) -> ModelShape:
    return ModelShape.of(
        LlamaConfig(
            vocab_size=ids, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv, head_dim=head, tie_word_embeddings=tied,
        )
    )  # fmt: skip


SIZES = {
    "1B": shape(16, 2048, 32, 8, 8192, ids=128256, head=64, tied=True),
    "7B": shape(28, 3584, 28, 4, 18944, ids=151936, head=128, tied=False),
    "72B": shape(80, 8192, 64, 8, 29568, ids=151936, head=128, tied=False),
}


def training_row(name: str, trained: str, ranks: str) -> list[float]:
    plan = TrainingPlan(
        rows=8, rollout_rows=32, scored_rows=32, prompt_length=64, response_length=576,
        ranks=int(ranks), compute_bytes=2,
        trained_parameters=None if trained == "all" else lora_parameters(SIZES[name], 16),
        is_checkpointed=True, logits_chunk=1024, engine_bytes=0,
    )  # fmt: skip
    found = estimate_memory(SIZES[name], plan)
    parts = (found.weights, found.optimizer, found.reference, found.gradients, found.activations)
    return [*parts, found.gathered, found.logits, found.peak]


def test_the_tables_of_the_page_are_computed() -> None:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in SCALING.read_text().splitlines()
    ]
    rows = [cells for cells in lines if cells[0] in SIZES]
    training = [cells for cells in rows if len(cells) == 11]
    serving = [cells for cells in rows if len(cells) == 6]
    assert (len(training), len(serving)) == (7, 3)
    for cells in training:
        assert cells[3:] == [f"{value / 1e9:.1f}" for value in training_row(*cells[:3])], cells[:3]
    for name, *cells in serving:
        cache = SIZES[name].cache_bytes(1, number_bytes=2) / 1e3
        split = [serving_bytes(SIZES[name], tokens=64 * 1500, gpus=gpus) / 1e9 for gpus in (1, 2, 4, 8)]
        assert cells == [f"{value:.1f}" for value in (cache, *split)], name
