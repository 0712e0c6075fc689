"""One rank of the checks that need several: started by `torch.distributed.run`, read by `test_fsdp.py`.

Arguments: a folder for what is found, and the names of the checks. Each check compares with what one process
computes, and writes `<folder>/<check>.json` on the first rank when it holds on all ranks.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unirl.errors import ConfigError
from unirl.policies.adapters import add_adapters
from unirl.policies.checkpoints import load_policy
from unirl.policies.policy import Policy
from unirl.policies.sharded_tensors import whole
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.generic_decoder import CopyDecoder, GenericDecoder
from unirl.rollout.native import NativeEngine
from unirl.trainer.checkpoint import load_checkpoint
from unirl.trainer.checkpoint_saver import CheckpointSaver
from unirl.trainer.collect import make_experience, roll_out
from unirl.trainer.distribution import Distribution
from unirl.trainer.rank_failure import FailureWatch
from unirl.trainer.replay import replay_tokens
from unirl.trainer.row_batches import join_experiences
from unirl.trainer.sharding import open_accelerator, prepare_policy, shard
from unirl.trainer.stages import Stage
from unirl.trainer.update import update_policy
from unirl.types import CriticKind, Experience, Rollout, SamplingSettings, Scores

TESTS = Path(__file__).parents[1]
TOY = SimpleNamespace(**runpy.run_path(str(TESTS / "toy.py")))
NUM_PROMPTS, GROUP_SIZE, LENGTH = 4, 2, 41
LENGTHS = (1, 41, 2, 40, 3, 25, 1, 33)
"""Response tokens of the 8 rows."""
STAGE = Stage(
    name="s",
    direction="text",
    prompts="true",
    steps=1,
    updates_per_step=1,
    entropy_coef=0.01,
    kl_coef=0.1,
    kl_in="loss",
    max_words=LENGTH - 1,
    max_grad_norm=1e9,
)


class Alone:
    """What `Accelerator` is to one process, in a program of several."""

    num_processes, process_index, device, is_fsdp2 = 1, 0, torch.device("cpu"), False

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def no_sync(self, model: nn.Module) -> nullcontext[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def make_policy(dtype: torch.dtype = torch.float64, **sizes: int) -> Policy:
    policy: Policy = TOY.make_policy(seed=2, **sizes).to(dtype)
    with torch.no_grad():
        policy.critic.value.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


def make_rollouts(policy: Policy) -> list[Rollout]:
    """One for each prompt, with responses that end where `LENGTHS` says."""
    rollouts = roll_out(
        NativeEngine(policy),
        TOY.make_prompts("text", NUM_PROMPTS),
        group_size=GROUP_SIZE,
        length=LENGTH,
        sampling=STAGE.sampling,
        seeds=[(1, p) for p in range(NUM_PROMPTS)],
        micro_prompts=1,
    )
    return [stretch(rollout, LENGTHS[2 * i : 2 * i + 2], seed=i) for i, rollout in enumerate(rollouts)]


def stretch(rollout: Rollout, lengths: Sequence[int], *, seed: int) -> Rollout:
    """The same prompts with responses of other lengths, of ids that are allowed."""
    policy_ids = rollout.response_ids
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    known = policy_ids[rollout.response_mask]
    ids = known[torch.randint(len(known), (len(lengths), width), generator=generator)]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    first = rollout.origin.select(torch.zeros(len(lengths), dtype=torch.long))
    origin = type(first)(
        **{
            name: getattr(first, name)[:, :1].expand(-1, width).clone()
            if isinstance(getattr(first, name), Tensor)
            else getattr(first, name)
            for name in first.__dataclass_fields__
        }
    )
    prompt = rollout.prompt_length
    return replace(
        rollout,
        input_ids=torch.cat([rollout.input_ids[:, :prompt], ids], dim=1),
        attention_mask=torch.cat([rollout.attention_mask[:, :prompt], mask], dim=1),
        response_mask=mask,
        old_logprobs=torch.zeros(mask.shape),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        origin=origin,
    )


def experiences_of(
    accelerator: Accelerator | Alone, policy: Policy, rollouts: Sequence[Rollout], first: int
) -> list[Experience]:
    """Both samples of the last prompt could not be scored, so its micro-batch is masked as a whole."""
    totals = torch.linspace(0, 1, NUM_PROMPTS * GROUP_SIZE).square().double()
    totals[-GROUP_SIZE:] = torch.nan
    parts = totals.numpy().reshape(NUM_PROMPTS, GROUP_SIZE)[first : first + len(rollouts)]
    reference = TOY.make_policy(seed=3).to(policy.dtype)
    made, _ = make_experience(
        accelerator, policy, reference, rollouts, [Scores(total=part) for part in parts], STAGE, kl_coef=0.1
    )
    return made


def gradients(
    accelerator: Accelerator | Alone,
    model: nn.Module,
    policy: Policy,
    batches: Sequence[Experience],
    **options: Any,
) -> dict[str, Tensor]:
    """Of one update, which does not move the weights; whole."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    update_policy(accelerator, model, optimizer, batches, STAGE, kl_coef=0.1, **options)
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }


def require_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], *, atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for part in ("lm.", "critic."):
        assert max(float(value.abs().max()) for name, value in wanted.items() if name.startswith(part)) > 1e-4
    for name, value in wanted.items():
        gap = float((found[name] - value).abs().max())
        assert gap <= atol, f"{name}: {gap}"


def of_one_process(policy: Policy, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """The gradient of one batch, which accumulation gives as well."""
    alone = Alone()
    batches = experiences_of(alone, policy, rollouts, 0)
    assert [bool(batch.loss_mask.any()) for batch in batches] == [True] * (NUM_PROMPTS - 1) + [False]
    one = gradients(alone, policy, policy, [join_experiences(batches)])
    require_equal(gradients(alone, policy, policy, batches), one)
    return one


def with_own_critic() -> Policy:
    policy = make_policy()
    policy.take_critic("own")
    with torch.no_grad():
        policy.critic.head.value.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy.to(torch.float64)


def check_gradients(distribution: Distribution, make: Callable[[], Policy] = make_policy) -> None:
    """One batch == accumulated == all ranks, rollout by rollout and dealt out under a budget of tokens."""
    accelerator = open_accelerator(distribution)
    rollouts = make_rollouts(make())
    wanted = of_one_process(make(), rollouts)
    size = NUM_PROMPTS // accelerator.num_processes
    first = accelerator.process_index * size
    policy = make()
    kind: CriticKind = "own" if make is with_own_critic else "shared"
    model = prepare_policy(accelerator, distribution, policy, critic=kind).model
    mine = experiences_of(accelerator, policy, rollouts[first : first + size], first)
    require_equal(gradients(accelerator, model, policy, mine), wanted)
    require_equal(gradients(accelerator, model, policy, mine, micro_batch_tokens=128), wanted)


def ddp_gradients(folder: Path) -> None:
    check_gradients(Distribution())


def fsdp2_gradients(folder: Path) -> None:
    check_gradients(Distribution(sharding="fsdp2"))


def ddp_own_critic(folder: Path) -> None:
    check_gradients(Distribution(), with_own_critic)


def fsdp2_own_critic(folder: Path) -> None:
    """Its layers are cut over the ranks and computed twice, as the policy's are."""
    check_gradients(Distribution(sharding="fsdp2", checkpoint_activations=True), with_own_critic)


def fsdp2_checkpointed(folder: Path) -> None:
    """Layers that are computed twice give the same gradient."""
    check_gradients(Distribution(sharding="fsdp2", checkpoint_activations=True, offload_reference=True))


def tied_embeddings(folder: Path) -> None:
    """Embedding and head stay one tensor, and its gradient is that of both uses."""
    accelerator = open_accelerator(Distribution(sharding="fsdp2"))

    def tied() -> Policy:
        policy = make_policy()
        policy.lm.config.tie_word_embeddings = True
        policy.lm.lm_head.weight = policy.lm.model.embed_tokens.weight
        return policy

    rollouts = make_rollouts(tied())
    wanted = of_one_process(tied(), rollouts)
    policy = tied()
    prepared = prepare_policy(accelerator, Distribution(sharding="fsdp2"), policy)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight
    size = NUM_PROMPTS // accelerator.num_processes
    first = accelerator.process_index * size
    mine = experiences_of(accelerator, policy, rollouts[first : first + size], first)
    require_equal(gradients(accelerator, prepared.model, policy, mine), wanted)


def fsdp_01(folder: Path) -> None:
    """Save after 3 steps; loaded in the same process, 3 more steps are those of 6 straight, bit for bit."""
    distribution = Distribution(sharding="fsdp2")
    accelerator = open_accelerator(distribution)
    rank, size = accelerator.process_index, accelerator.num_processes
    share = NUM_PROMPTS // size
    batches = experiences_of(
        Alone(), make_policy(torch.float32), make_rollouts(make_policy(torch.float32)), 0
    )
    mine = batches[rank * share : (rank + 1) * share]

    def steps(prepared: Any, number: int) -> None:
        for group in prepared.optimizer.param_groups:
            group["lr"] = 1e-2
        for _ in range(number):
            update_policy(accelerator, prepared.model, prepared.optimizer, mine, STAGE, kl_coef=0.1)

    straight = prepare_policy(accelerator, distribution, make_policy(torch.float32))
    steps(straight, 3)
    saver = CheckpointSaver([folder / "checkpoints"], keep=1, rank=rank, world_size=size)
    saver.save(step=3, model=straight.model, optimizer=straight.optimizer.optimizer, state={"answer": 42})
    saver.finish()
    accelerator.wait_for_everyone()
    at_3 = state_of(straight)
    steps(straight, 3)
    loaded = prepare_policy(accelerator, distribution, make_policy(torch.float32, width=32))
    state = load_checkpoint(
        folder / "checkpoints" / "step-00000003", model=loaded.model, optimizer=loaded.optimizer.optimizer
    )
    assert state == {"answer": 42}
    same(state_of(loaded), at_3)
    steps(loaded, 3)
    same(state_of(loaded), state_of(straight))
    if rank == 0:
        save_file({name: value.contiguous() for name, value in at_3.items()}, folder / "at_3.safetensors")


def state_of(prepared: Any) -> dict[str, Tensor]:
    """Parameters and optimizer, whole, under the names of a checkpoint."""
    found: dict[str, Tensor] = {}
    for name, parameter in prepared.model.named_parameters():
        found[f"policy/{name}"] = whole(parameter.detach()).clone()
        for field, value in prepared.optimizer.state[parameter].items():
            found[f"optimizer/{name}:{field}"] = whole(value).clone()
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def fsdp_03(folder: Path) -> None:
    """What is frozen may differ inside a group, change after wrapping, and be of another dtype."""
    distribution = Distribution(sharding="fsdp2")
    accelerator = open_accelerator(distribution)
    rank = accelerator.process_index
    batches = experiences_of(
        Alone(), make_policy(torch.float32), make_rollouts(make_policy(torch.float32)), 0
    )
    mine = batches[2 * rank : 2 * rank + 2]
    policy = make_policy(torch.float32)
    embedding = policy.lm.model.embed_tokens.weight
    embedding.requires_grad_(False)
    prepared = prepare_policy(accelerator, distribution, policy)
    before = gradients(accelerator, prepared.model, policy, mine)
    assert "lm.model.embed_tokens.weight" not in before
    policy.lm.model.embed_tokens.weight.requires_grad_(True)
    after = gradients(accelerator, prepared.model, policy, mine)
    assert after.keys() - before.keys() == {"lm.model.embed_tokens.weight"}
    assert after["lm.model.embed_tokens.weight"].abs().max() > 1e-4

    lora = make_policy(torch.float32)
    nn.Module.to(lora.lm, torch.bfloat16)
    add_adapters(lora.lm, rank=2, seed=0)
    for parameter in lora.trained_parameters():
        parameter.data = parameter.data.float()
    prepared = prepare_policy(accelerator, distribution, lora)
    found = gradients(accelerator, prepared.model, lora, mine)
    assert found and all("lora_" in name or name.startswith("critic.") for name in found)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert max(float(value.abs().max()) for name, value in found.items() if "lora_B" in name) > 1e-5
    assert {p.dtype for p in lora.lm.parameters() if not p.requires_grad} == {torch.bfloat16}
    # Fresh adapters add nothing, so the reference, which is the model without them, says the same.
    with torch.no_grad():
        said = [
            replay_tokens(model, lora, mine[0].rollout, STAGE.sampling).logprobs
            for model in (lora, prepared.reference)
        ]
    assert torch.equal(*said)


def check_pictures_on_one_rank(distribution: Distribution) -> None:
    """A rank that saw no picture does not keep the others waiting, and counts as zero."""
    accelerator = open_accelerator(distribution)
    janus: Callable[[Any], Any] = runpy.run_path(str(TESTS / "unirl" / "policies" / "test_janus.py"))[
        "make_janus"
    ]
    policy, spread = janus(TOY), janus(TOY)

    def loss(model: nn.Module, part: int) -> Tensor:
        prompts = TOY.make_prompts("text", 2)
        rows = [policy.prompt_ids(prompt) for prompt in prompts]
        ids = torch.tensor([[*row, *policy.vocabulary.words("black and")] for row in rows])
        pictures = policy.pictures(prompts)
        if part == 1:
            ids = ids.where(ids != policy.lm.config.image_token_id, policy.vocabulary.bos)
            pictures = None
        mask = torch.ones_like(ids, dtype=torch.bool)
        output = model(ids, mask, prompt_length=len(rows[0]), direction="text", pictures=pictures)
        return -output.logprobs.sum() + output.values.sum()

    (loss(policy, 0) + loss(policy, 1)).backward()
    wanted = {name: p.grad / 2 for name, p in policy.named_parameters() if p.grad is not None}
    assert any("aligner" in name for name in wanted)
    model = prepare_policy(accelerator, distribution, spread).model
    for _ in range(3):
        spread.zero_grad()
        accelerator.backward(loss(model, accelerator.process_index))
    found = {name: whole(p.grad) for name, p in spread.named_parameters() if p.grad is not None}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
    assert not any(value.any() for name, value in found.items() if name not in wanted)
    # The picture model is called by itself, so every rank has all of it.
    codes = torch.arange(4)[None]
    assert torch.equal(spread.image_tokenizer().decode(codes), policy.image_tokenizer().decode(codes))


def fsdp_06(folder: Path) -> None:
    check_pictures_on_one_rank(Distribution(sharding="fsdp2"))


def ddp_06(folder: Path) -> None:
    check_pictures_on_one_rank(Distribution())


def fsdp_07(folder: Path) -> None:
    """Ranks that stop at token 2 and at token 40 sample, with what one process samples."""
    distribution = Distribution(sharding="fsdp2")
    accelerator = open_accelerator(distribution)
    length = 2 if accelerator.process_index == 0 else 40
    prompts = TOY.make_prompts("text", 2)
    request = RolloutRequest(
        prompts=prompts,
        group_size=2,
        max_new_tokens=length,
        sampling=SamplingSettings(temperature=1.0),
        seeds=[(5, 0), (5, 1)],
    )
    policy = make_policy(torch.float32)
    wanted = NativeEngine(policy).rollout(request).input_ids
    engines = [NativeEngine(policy), NativeEngine(policy, decoder=CopyDecoder(policy))]
    bare = GenericDecoder(policy)
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    prepare_policy(accelerator, distribution, policy)
    for engine in engines:
        engine.sync(policy, 1)
        assert torch.equal(engine.rollout(request).input_ids, wanted)
        accelerator.wait_for_everyone()
    policy.save(folder / "saved", is_writer=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    saved = dict(load_policy(folder / "saved").weights())
    same(saved, weights)
    try:
        bare.sync(policy)
    except ConfigError as error:
        assert "own_weights=True" in str(error)
    else:
        raise AssertionError("a decoder without a copy took sharded weights")


def bf16(folder: Path) -> None:
    """Matrices in bfloat16; weights and gradients in float32, and near what float32 gives."""
    rollouts = make_rollouts(make_policy(torch.float32))
    batches = experiences_of(Alone(), make_policy(torch.float32), rollouts, 0)
    whole_policy = make_policy(torch.float32)
    wanted = gradients(Alone(), whole_policy, whole_policy, batches)
    distribution = Distribution(sharding="fsdp2")
    accelerator = open_accelerator(distribution)
    rank = accelerator.process_index
    policy = make_policy(torch.float32)
    shard(policy, init_device_mesh("cpu", (2,)), replace(distribution, mixed_precision="bf16"))
    found = gradients(accelerator, policy, policy, batches[2 * rank : 2 * rank + 2])
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in policy.parameters())
    for part in ("lm.", "critic."):
        left, right = (
            torch.cat([v.flatten() for n, v in g.items() if n.startswith(part)]) for g in (found, wanted)
        )
        assert torch.cosine_similarity(left, right, dim=0) > 0.98
        assert not torch.equal(left, right)


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        ddp_gradients,
        ddp_06,
        ddp_own_critic,
        fsdp2_gradients,
        fsdp2_own_critic,
        fsdp2_checkpointed,
        tied_embeddings,
        fsdp_01,
        fsdp_03,
        fsdp_06,
        fsdp_07,
        bf16,
    )
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = open_accelerator(Distribution())
    with FailureWatch(accelerator) as failures:
        for name in sys.argv[2:]:
            failures.at(name)
            CHECKS[name](folder)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / f"{name}.json").write_text(json.dumps({"ranks": accelerator.num_processes}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
