from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unirl.errors import RolloutError
from unirl.rollout import weight_sync_memory
from unirl.rollout.vllm_requests import WeightBucket
from unirl.rollout.weight_sync import buckets
from unirl.rollout.weight_sync_checksums import CHECKSUMS, checksum, copy_checked
from unirl.rollout.weight_sync_map import EngineWeights
from unirl.rollout.weight_sync_memory import SharedBlock, fill, layout, map_block, pack, tensors_in, unpack

WIDTH, VOCABULARY, PADDED = 4, 6, 8

Weights = list[tuple[str, Tensor]]


class EngineModel(nn.Module):
    """Fuses q, k and v, pads the vocabulary, turns a matrix, and may share head and embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * WIDTH, WIDTH), requires_grad=False)
        self.turned = nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH), requires_grad=False)
        self.embed = nn.Parameter(torch.full((PADDED, WIDTH), 7.0), requires_grad=False)
        self.head = self.embed if tied else nn.Parameter(torch.zeros(PADDED, WIDTH), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                start = "qkv".index(name) * WIDTH
                self.qkv.data[start : start + WIDTH].copy_(tensor)
            elif name == "turned":
                self.turned.data.copy_(tensor.t())
            elif name in ("embed", "head"):
                parameter = getattr(self, name)
                parameter.data[: len(tensor)].copy_(tensor)
                parameter.data[len(tensor) :].fill_(0)
            elif name == "doubled":
                self.turned.data.copy_((tensor * 2).t())


def trainer_weights(seed: int = 0, *, tied: bool = False) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "turned": (2 * WIDTH, WIDTH)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["embed"] = torch.randn(VOCABULARY, WIDTH, generator=generator)
    found["head"] = found["embed"] if tied else torch.randn(VOCABULARY, WIDTH, generator=generator)
    return list(found.items())


def without(weights: Weights, name: str) -> Weights:
    return [(other, tensor) for other, tensor in weights if other != name]


@pytest.mark.parametrize("tied", [True, False])
def test_every_update_reaches_the_place_where_the_engine_computes(tied: bool) -> None:
    model = EngineModel(tied=tied)
    engine = EngineWeights(model)
    for seed in (0, 1, 2):
        sent = dict(trainer_weights(seed, tied=tied))
        engine.begin()
        sums = engine.put(list(sent.items()))
        engine.finish()
        assert all(pair.sent == pair.held for pair in sums.values())
        torch.testing.assert_close(model.qkv, torch.cat([sent["q"], sent["k"], sent["v"]]), rtol=0, atol=0)
        torch.testing.assert_close(model.turned, sent["turned"].t(), rtol=0, atol=0)
        torch.testing.assert_close(model.head[:VOCABULARY], sent["head"], rtol=0, atol=0)


def test_the_checksum_is_that_of_what_the_engine_holds() -> None:
    model = EngineModel(tied=True)
    engine = EngineWeights(model)
    engine.put(trainer_weights(tied=True))
    other_head = torch.ones(VOCABULARY, WIDTH)
    sums = engine.put([*without(trainer_weights(1, tied=True), "head"), ("head", other_head)])
    assert sums["head"].sent == checksum(other_head, "xxh3") != sums["head"].held
    assert sums["embed"].sent == sums["embed"].held


def test_places_can_be_learnt_before_the_weights_come_another_way() -> None:
    model = EngineModel(tied=False)
    engine = EngineWeights(model)
    sent = trainer_weights(4)
    shapes = {name: tuple(tensor.shape) for name, tensor in sent}
    engine.learn(shapes, dtype=torch.float32, device=torch.device("cpu"))
    model.load_weights(sent)
    engine.finish()
    assert engine.checksums() == {name: checksum(tensor, "xxh3") for name, tensor in sent}


def test_what_the_trainer_leaves_out_is_named() -> None:
    engine = EngineWeights(EngineModel(tied=False))
    engine.put(without(trainer_weights(), "head"))
    with pytest.raises(RolloutError, match=r"fills head \(0 of 32 values\)"):
        engine.finish()
    engine.put(trainer_weights())
    engine.finish()
    engine.begin()
    engine.put(without(trainer_weights(), "k"))
    with pytest.raises(RolloutError, match="did not send k"):
        engine.finish()


@pytest.mark.parametrize("name", ["adapter", "doubled"])
def test_what_the_engine_does_not_take_as_it_is_is_named(name: str) -> None:
    engine = EngineWeights(EngineModel(tied=False))
    with pytest.raises(RolloutError, match=f"copied 0 of the 32 values of {name}"):
        engine.put([(name, torch.zeros(2 * WIDTH, WIDTH))])


def test_a_tensor_of_another_model_is_named() -> None:
    engine = EngineWeights(EngineModel(tied=False))
    with pytest.raises(RolloutError, match=r"loader stopped at k \(9, 9\): RuntimeError: .*another model"):
        engine.put([*trainer_weights()[:1], ("k", torch.zeros(9, 9))])
    engine.put(trainer_weights())
    engine.finish()
    engine.begin()
    wider = [
        (name, torch.zeros(8, WIDTH)) if name == "k" else (name, held) for name, held in trainer_weights()
    ]
    with pytest.raises(RolloutError, match=r"k is \(8, 4\), the engine's model has \(4, 4\).*another model"):
        engine.put(wider)
    engine.begin()
    engine.put(trainer_weights())
    engine.finish()


def test_a_tied_head_need_not_be_sent() -> None:
    engine = EngineWeights(EngineModel(tied=True))
    engine.put(without(trainer_weights(tied=True), "head"))
    engine.finish()


@pytest.mark.parametrize("kind", CHECKSUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_sees_every_byte(kind: str, dtype: torch.dtype) -> None:
    tensor = torch.arange(99).to(dtype)
    seen = {checksum(tensor, kind)}
    for place in range(99):
        changed = tensor.clone()
        changed[place] += 1
        seen.add(checksum(changed, kind))
    swapped = tensor.clone()
    swapped[[3, 5]] = tensor[[5, 3]]
    assert len(seen | {checksum(swapped, kind)}) == 101
    assert checksum(tensor.clone(), kind) == checksum(tensor, kind)


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_a_checked_copy_sums_both_sides(kind: str) -> None:
    source, target = torch.randn(200_000), torch.zeros(200_000)
    assert copy_checked(target, source, kind) == (checksum(source, kind),) * 2
    assert torch.equal(source, target)


def test_weights_are_cut_into_buckets_of_the_engines_dtype() -> None:
    weights = [(str(n), torch.randn(10)) for n in range(5)]
    found = list(buckets(weights, dtype=torch.bfloat16, bucket_bytes=40))
    assert [[name for name, _ in bucket.weights] for bucket in found] == [["0", "1"], ["2", "3"], ["4"]]
    assert [bucket.num_bytes for bucket in found] == [40, 40, 20]


def test_sharded_weights_are_gathered() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = nn.Linear(6, 4)
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert all(isinstance(tensor, DTensor) for tensor in layer.state_dict().values())
        (bucket,) = buckets(layer.state_dict().items(), dtype=torch.float32)
        for name, tensor in bucket.weights:
            assert not isinstance(tensor, DTensor) and torch.equal(tensor, before[name])
    finally:
        torch.distributed.destroy_process_group()


def some_bucket() -> WeightBucket:
    return WeightBucket(
        weights=[("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.tensor(2.5))]
    )


def test_a_bucket_travels_as_bytes() -> None:
    bucket = some_bucket()
    body, sums = pack(bucket, "xxh3")
    for (name, tensor), (found_name, found) in zip(bucket.weights, unpack(body), strict=True):
        assert (name, sums[name]) == (found_name, checksum(found, "xxh3"))
        assert torch.equal(tensor, found)
    with pytest.raises(RolloutError, match="cut short"):
        unpack(body[:-80])


def test_a_bucket_travels_through_shared_memory() -> None:
    bucket = some_bucket()
    entries, num_bytes = layout(bucket)
    shared = SharedBlock()
    fill(shared.reserve(num_bytes), bucket, entries, "words")
    other = map_block(shared.path, num_bytes)
    assert all(
        torch.equal(tensor, found)
        for (_, tensor), (_, found) in zip(bucket.weights, tensors_in(other, entries), strict=True)
    )
    with pytest.raises(RolloutError, match="the trainer says 100000"):
        map_block(shared.path, 100_000)
    shared.close()
    with pytest.raises(RolloutError, match="no such file"):
        map_block(shared.path, num_bytes)


def test_memory_that_a_killed_trainer_left_behind_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, signal; from unirl.rollout.weight_sync_memory import SharedBlock; block = SharedBlock(); "
        "block.reserve(100); print(block.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    left = Path(done.stdout.strip())
    assert left.is_file()
    alive = SharedBlock()
    monkeypatch.setattr(weight_sync_memory, "YOUNG_S", 0.0)
    other = SharedBlock()
    assert not left.exists() and alive.path.is_file() and other.path.is_file()
    for block in (alive, other, other):
        block.close()
    assert not alive.path.exists() and not other.path.exists()


def test_no_other_file_is_mapped(tmp_path: object) -> None:
    with pytest.raises(RolloutError, match="no such file"):
        map_block(SharedBlock().path.with_name("passwd"), 1)
