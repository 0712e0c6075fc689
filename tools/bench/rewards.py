"""What scoring costs beside the model's forward, and whether endpoints and the cache keep their promises.

python -m tools.bench.rewards [--rounds 25] [--threads 2] [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.faulty_endpoint import Faults, Seen, logprob_of, make_app, serving
from tools.bench.results import PACKAGES, Row, median_row, write_results
from tools.bench.rewards_data import SIZES, build_reward, own_forward, samples
from unirl.rewards import VlmYesNo
from unirl.rewards.backends import VlmRequest
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.replicas import RetryPolicy
from unirl.rewards.cache import CachedReward

BATCH = 64
RETRIES = RetryPolicy(attempts=12, timeout_s=1.0, first_wait_s=0.01, max_wait_s=0.2)


def main() -> None:
    """Measure everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, requests and pairs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds, num_requests, num_pairs = (5, 200, 1000) if options.quick else (options.rounds, 1000, 10_000)
    with tempfile.TemporaryDirectory() as directory:
        rows = []
        for size in ("toy", "larger"):
            path = build_reward(Path(directory) / size, size)
            rows += overhead_rows(path, size, rounds)
        toy = Path(directory) / "toy"
        rows += [*batching_rows(toy), *endpoint_rows(num_requests)]
        rows += cache_rows(toy, Path(directory) / "scores", num_pairs)
    path = write_results(
        "rewards",
        rows,
        notes=[
            f"{options.threads} threads, fp32, pictures of 32 x 32 that all differ. Toy: "
            f"{SIZES['toy'].width} channels in {SIZES['toy'].num_layers} layers, larger: "
            f"{SIZES['larger'].width} in {SIZES['larger'].num_layers}. Scoring is `VlmYesNo.score`, from "
            "samples to scores. Transformers' forward is that of the same class and weights as transformers "
            "loads them, given ready ids and patches and asked for the last logits; the backend's forward is "
            "what scoring itself runs, given ready prompts. Rounds are interleaved, each with its ratio, and "
            "every other one is run backwards; the median is told.",
            "The endpoint is a stub on loopback, 16 requests at once; those at once are counted as long as "
            "their client waits. Of the tries 8% are answered with a 500, 2% not within the time limit, 5% "
            "doubled and in another order, and 5% with the answer to another request.",
        ],
        packages=(*PACKAGES, "httpx"),
    )
    print(path.with_suffix(".md").read_text())


def overhead_rows(directory: Path, size: str, rounds: int) -> list[Row]:
    """Scoring from samples to scores, beside the model's own forward on inputs that are ready."""
    reward, batch = _load(directory), samples(BATCH)
    backend = reward.backend
    assert isinstance(backend, TransformersBackend)
    forward = own_forward(directory, batch)
    asked = [reward.question.request(sample) for sample in batch]
    prepared, _ = backend.prepare([request for request in asked if isinstance(request, VlmRequest)])
    ready = list(prepared.values())

    @torch.inference_mode()
    def inner() -> torch.Tensor:
        logits: torch.Tensor = backend.read(backend.padded(ready), backend.look(ready)).logits
        return logits

    reward.score(batch)
    gap = float((forward() - inner()).abs().max())
    calls: tuple[Callable[[], object], ...] = (lambda: reward.score(batch), forward, inner)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds):
        for place in (0, 1, 2) if number % 2 else (2, 1, 0):
            times[place].append(1e3 * _timed(calls[place]))
    scoring, forwards, inners = times
    ratio = float(np.median(np.array(scoring) / np.array(forwards)))
    added = float(np.median(np.array(scoring) / np.array(inners)))
    return [
        median_row(
            f"scoring {BATCH} samples, {size} model",
            scoring,
            "ms",
            peer="transformers' forward",
            peer_values=forwards,
            target="at most 1.1 of the forward",
            holds=ratio <= 1.1,
        ),
        median_row(
            f"the same, beside the forward that it runs, {size} model",
            scoring,
            "ms",
            peer="the backend's forward",
            peer_values=inners,
            target="at most 1.1 of the forward",
            holds=added <= 1.1,
        ),
        _fact(f"logits of both forwards, {size} model, largest gap", gap, "", "at most 1e-4", gap <= 1e-4),
    ]


def batching_rows(directory: Path) -> list[Row]:
    """The same scores alone and in company; a prompt padded on the right is refused."""
    reward, batch = _load(directory), samples(BATCH)
    together = reward.score(batch).total
    alone = np.concatenate([reward.score([sample]).total for sample in batch])
    gap = float(np.abs(together - alone).max())
    return [_fact(f"score alone and among {BATCH}, largest gap", gap, "", "at most 1e-5", gap <= 1e-5)]


def endpoint_rows(num: int) -> list[Row]:
    """Requests through an endpoint of which one try in five goes wrong."""
    requests = [VlmRequest(key=f"sample-{row}", text=f"question {row}") for row in range(num)]
    faults, seen = Faults(errors=0.08, timeouts=0.02, doubled=0.05, swapped=0.05, hang_s=2.0), Seen()
    with serving(make_app(faults, seen)) as url:
        backend = EndpointBackend([url], retries=RETRIES, concurrency=16)
        started = time.perf_counter()
        answered = backend.answer_logprobs(requests, (("yes",), ("no",)))
        seconds = time.perf_counter() - started
        backend.close()
    expected = np.array([logprob_of(request.text) for request in requests])
    right = int((np.abs(answered.logprobs[:, 0] - expected) < 1e-12).sum())
    return [
        _fact(f"of {num} through a faulty endpoint, right and in order", right, "", f"{num}", right == num),
        _fact(
            "request ids that the server saw, tries of one sample counted once",
            len(seen.tries),
            "",
            f"{num}",
            len(seen.tries) == num,
        ),
        _fact("tries of all requests", sum(seen.tries.values()), "", None, None),
        _fact("most requests at once", seen.most_at_once, "", "at most 16", seen.most_at_once <= 16),
        _fact(f"seconds for {num} requests", seconds, "s", None, None),
    ]


def cache_rows(directory: Path, store: Path, num: int) -> list[Row]:
    """Pairs scored for the first time, and again by a cache that was opened afresh."""
    batch = samples(num)
    reward = _load(directory)
    reward.score(batch[:BATCH])
    empty = CachedReward(reward, store)
    first_s = _timed(lambda: empty.score(batch))
    again = CachedReward(reward, store)
    second_s = _timed(lambda: again.score(batch))
    return [
        Row(
            metric=f"scoring {num} pairs a second time, from the cache",
            value=second_s,
            unit="s",
            runs=1,
            min=second_s,
            max=second_s,
            peer="the first time",
            peer_value=first_s,
            ratio=first_s / second_s,
            target="ratio (first over second) at least 50",
            holds=first_s / second_s >= 50 and again.num_hits == num,
        )
    ]


def _load(directory: Path) -> VlmYesNo:
    reward = VlmYesNo.load(directory)
    reward.min_mass = 0.0  # an untrained model rarely answers yes or no, and need not be warned of
    return reward


def _fact(metric: str, value: float, unit: str, target: str | None, holds: bool | None) -> Row:
    return Row(
        metric=metric, value=value, unit=unit, runs=1, min=value, max=value, target=target, holds=holds
    )


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
