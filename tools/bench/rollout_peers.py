"""What the native engine is compared with: `transformers.generate` here, vLLM in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.bench.results import ROOT
from unirl.policies.padding import left_pad
from unirl.policies.token_lm import TokenLM

__all__ = ["VllmChild", "generate_with_transformers"]


def generate_with_transformers(policy: TokenLM, ids: Sequence[Sequence[int]], length: int) -> float:
    """Seconds that `generate` takes to sample `length` tokens behind each prompt."""
    rows, mask = left_pad(ids, policy.vocabulary.pad)
    started = time.perf_counter()
    with torch.inference_mode():
        made = policy.lm.generate(
            input_ids=rows,
            attention_mask=mask.long(),
            do_sample=True,
            top_k=0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=policy.vocabulary.pad,
        )
    if made.shape[1] != rows.shape[1] + length:
        raise RuntimeError(f"generate made {made.shape[1] - rows.shape[1]} tokens, {length} were asked for")
    return time.perf_counter() - started


class VllmChild:
    """vLLM in a child process that waits for work: one JSON line in, one out."""

    def __init__(self, directory: Path, *, max_length: int, threads: int) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "tools.bench.rollout_vllm", str(directory), str(max_length)]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **settings},
        )
        self._answer({"ids": [[1, 2, 3]] * 64, "length": 8})

    def generate(self, ids: Sequence[Sequence[int]], length: int) -> float:
        """Seconds that vLLM takes for the same work."""
        return self._answer({"ids": [list(row) for row in ids], "length": length})

    def close(self) -> None:
        """End the child."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child.wait()

    def _answer(self, work: dict[str, object]) -> float:
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("the child has no pipes")
        self._child.stdin.write(json.dumps(work) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"vLLM ended with exit status {self._child.wait()} before it answered")
