"""The server and its client, over loopback, with an engine that needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.errors import ConfigError, RolloutError
from unirl.rollout.server import make_app
from unirl.rollout.server_client import TOKEN_VARIABLE, RemoteVllm
from unirl.rollout.vllm_requests import (
    AllowedIds,
    Checksums,
    EngineInfo,
    TokenAnswer,
    TokenRequest,
    WeightBucket,
)
from unirl.rollout.weight_sync_checksums import checksum
from unirl.rollout.weight_sync_memory import Entry, map_block, tensors_in

uvicorn = pytest.importorskip("uvicorn", reason="the server needs the extra serve")

TOKEN = "secret"


class FakeEngine:
    """Keeps the weights that come and answers with the seeds."""

    def __init__(self) -> None:
        self.info = EngineInfo(endpoint="in process", dtype="float32", checksum="xxh3", policy_version=-1)
        self.held: dict[str, Tensor] = {}

    def generate(self, request: TokenRequest, *, step: int) -> TokenAnswer:
        if step < 0:
            raise RolloutError("the engine has random weights")
        return TokenAnswer(
            ids=tuple((seed,) for seed in request.seeds),
            logprobs=tuple((-0.1,) for _ in request.seeds),
            policy_version=self.info.policy_version,
        )

    def begin_update(self, *, step: int) -> None:
        self.held.clear()

    def put(self, bucket: WeightBucket, *, step: int) -> dict[str, Checksums]:
        return self._keep(bucket.weights)

    def put_shared(
        self, path: Path, num_bytes: int, entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Checksums]:
        return self._keep(
            tensors_in(map_block(path, num_bytes), [Entry.from_json(dict(entry)) for entry in entries])
        )

    def finish_update(self, version: int) -> None:
        self.info = replace(self.info, policy_version=version)

    def _keep(self, weights: Sequence[tuple[str, Tensor]]) -> dict[str, Checksums]:
        self.held.update((name, tensor.clone()) for name, tensor in weights)
        sums = {name: checksum(self.held[name], "xxh3") for name, _ in weights}
        return {name: Checksums(sent=held, held=held) for name, held in sums.items()}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    config = uvicorn.Config(make_app(engine, token=TOKEN), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def some_request() -> TokenRequest:
    return TokenRequest(
        prompts=((1, 2),),
        seeds=(3, 4),
        max_new_tokens=1,
        temperature=1.0,
        guidance=1.0,
        allowed=AllowedIds(masks=(((0, 9),),)),
        end_id=None,
    )


@pytest.mark.parametrize("shared_memory", [True, False])
def test_weights_arrive_whole_and_answers_have_their_version(
    url: str, engine: FakeEngine, shared_memory: bool
) -> None:
    client = RemoteVllm(url, token=TOKEN, shared_memory=shared_memory)
    assert (client.info.endpoint, client.info.policy_version) == (url, -1)
    buckets = [
        WeightBucket(weights=[("a", torch.randn(100)), ("b", torch.randn(2, 3))]),
        WeightBucket(weights=[("c", torch.randn(3000))]),
    ]
    client.begin_update(step=4)
    for bucket in buckets:
        sums = client.put(bucket, step=4)
        assert all(pair.sent == pair.held for pair in sums.values()) and len(sums) == len(bucket.weights)
    client.finish_update(4)
    sent = [pair for bucket in buckets for pair in bucket.weights]
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in sent)
    answer = client.generate(some_request(), step=4)
    assert (answer.ids, answer.policy_version) == (((3,), (4,)), 4)
    client.close()


def test_an_engines_error_reaches_the_trainer_with_its_place(url: str) -> None:
    client = RemoteVllm(url, token=TOKEN)
    with pytest.raises(RolloutError, match=rf"{url}/generate, step 2: status 400.*random weights"):
        client.generate(some_request(), step=2)
    client.close()


def test_another_trainers_weights_are_noticed(url: str, engine: FakeEngine) -> None:
    client = RemoteVllm(url, token=TOKEN)
    engine.finish_update(7)
    with pytest.raises(RolloutError, match="policy version 7, this trainer synced -1"):
        client.generate(some_request(), step=2)
    client.close()


def test_a_token_is_needed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RolloutError, match="status 401"):
        RemoteVllm(url, token="wrong")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        RemoteVllm(url)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RolloutError, match=r"http://127.0.0.1:9/info.*is the server running"):
        RemoteVllm("http://127.0.0.1:9", token=TOKEN)
