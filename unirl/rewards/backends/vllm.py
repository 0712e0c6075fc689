"""A vision-language model under vLLM, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unirl.rewards.backends.base import (
    AnswerLogprobs,
    Generation,
    VlmRequest,
    finite_answers,
    in_order,
)
from unirl.rewards.backends.identity import directory_identity
from unirl.rewards.backends.media_size import as_clip, media_problem
from unirl.rewards.backends.prompts import answer_sequences, prompt_text
from unirl.rewards.backends.vllm_start import start_vllm

__all__ = ["VllmBackend"]


class VllmBackend:
    """Answers with a model under vLLM; load it with `VllmBackend.load`.

    Args:
        llm: A `vllm.LLM` that gives raw log-probabilities.
        tokenizer: Of the same model.
        cell: Pixels of a side of the square that becomes one token.
        picture_id: Placeholder of pictures.
        clip_id: Placeholder of clips.
        identity: Names the weights.
        max_pixels: Largest picture.
    """

    def __init__(
        self,
        llm: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cell: int,
        picture_id: int,
        clip_id: int,
        identity: str,
        max_pixels: int = 4_000_000,
    ) -> None:
        self.tokenizer, self.max_pixels = tokenizer, max_pixels
        self.max_tokens: int = llm.llm_engine.model_config.max_model_len
        self._llm, self._cell, self._identity = llm, cell, identity
        self._picture_id, self._clip_id = picture_id, clip_id

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        dtype: str = "float32",
        max_tokens: int | None = None,
        max_media: int = 8,
        gpu_memory_fraction: float = 0.3,
    ) -> VllmBackend:
        """Start an engine on a model directory in the format of transformers.

        Args:
            directory: A Qwen2.5-VL.
            dtype: Of the weights.
            max_tokens: Longest prompt and answer together; None: what the model was made for.
            max_media: Most pictures in one request, and most clips.
            gpu_memory_fraction: Of the GPU, for weights and cache together.

        Raises:
            ConfigError: If vLLM is not installed or cannot run the model, or there is none in the directory.
        """
        directory = Path(directory)
        identity = f"vllm/{dtype}/{directory_identity(directory)}"
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        llm = start_vllm(
            directory,
            config,
            dtype=dtype,
            max_tokens=max_tokens,
            max_media=max_media,
            gpu_memory_fraction=gpu_memory_fraction,
        )
        vision = config["vision_config"]
        return cls(
            llm,
            AutoTokenizer.from_pretrained(directory),
            cell=vision["patch_size"] * vision["spatial_merge_size"],
            picture_id=config["image_token_id"],
            clip_id=config["video_token_id"],
            identity=identity,
        )

    @property
    def identity(self) -> str:
        """Names the weights and the type that they are computed in."""
        return self._identity

    def answer_logprobs(
        self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]
    ) -> AnswerLogprobs:
        """Say how likely each answer comes next; see `VlmBackend`."""
        from vllm import SamplingParams

        sequences = answer_sequences(self.tokenizer, answers)
        prompts, problems = self._prompts(requests)
        logprobs = np.full((len(requests), len(answers)), np.nan)
        wanted: dict[tuple[int, ...], set[int]] = {}
        for ids in (ids for group in sequences for ids in group):
            for length in range(len(ids)):
                wanted.setdefault(ids[:length], set()).add(ids[length])
        read: dict[tuple[int, ...], list[dict[int, float]]] = {}
        for start, tokens in wanted.items():
            extended = [
                {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *start]}
                for prompt in prompts.values()
            ]
            params = SamplingParams(
                max_tokens=1, temperature=0.0, logprob_token_ids=sorted(tokens), detokenize=False
            )
            outputs = self._llm.generate(extended, params, use_tqdm=False)
            read[start] = [
                {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
                for output in outputs
            ]
        for place, index in enumerate(prompts):
            for column, group in enumerate(sequences):
                spellings = [
                    sum(read[ids[:length]][place][ids[length]] for length in range(len(ids))) for ids in group
                ]
                logprobs[index, column] = np.logaddexp.reduce(spellings)
        return finite_answers(logprobs, problems)

    def token_logprobs(
        self, requests: Sequence[VlmRequest], *, token_ids: Sequence[int] = (), top: int = 0
    ) -> list[dict[int, float] | str]:
        """Log-probabilities of the tokens that are named, or of the most likely ones; or what is wrong.

        Args:
            requests: B questions.
            token_ids: Tokens to name.
            top: How many of the most likely tokens to name where `token_ids` is empty.
        """
        from vllm import SamplingParams

        prompts, problems = self._prompts(requests)
        wanted: dict[str, Any] = {"logprob_token_ids": sorted(token_ids)} if token_ids else {"logprobs": top}
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **wanted)
        outputs = self._llm.generate(list(prompts.values()), params, use_tqdm=False) if prompts else []
        named: dict[int, dict[int, float] | str] = dict(problems)
        for index, output in zip(prompts, outputs):
            entries = output.outputs[0].logprobs[0]
            named[index] = {token: entry.logprob for token, entry in entries.items()}
        return [named[index] for index in range(len(requests))]

    def generate(
        self,
        requests: Sequence[VlmRequest],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        """Let the model speak; see `VlmBackend`."""
        from vllm import SamplingParams

        prompts, problems = self._prompts(requests, room=max_new_tokens)
        params = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=int(np.random.default_rng([seed, index]).integers(2**63)),
                stop=list(stop),
                logprobs=0,
            )
            for index in prompts
        ]
        outputs = self._llm.generate(list(prompts.values()), params, use_tqdm=False) if prompts else []
        return in_order(
            {index: _generation(output.outputs[0]) for index, output in zip(prompts, outputs)}, problems
        )

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _prompts(
        self, requests: Sequence[VlmRequest], *, room: int = 1
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """vLLM's form of each request by index, and problems by index."""
        texts = [prompt_text(self.tokenizer, request) for request in requests]
        tokenized = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        prompts: dict[int, dict[str, Any]] = {}
        problems: dict[int, str] = {}
        for index, (request, ids) in enumerate(zip(requests, tokenized)):
            if (problem := self._problem(request, ids, room)) is not None:
                problems[index] = problem
                continue
            media: dict[str, Any] = {}
            if request.images:
                media["image"] = [Image.fromarray(as_clip(p, self._cell)[0]) for p in request.images]
            if request.clips:
                media["video"] = [_with_times(as_clip(clip, self._cell)) for clip in request.clips]
            prompts[index] = {"prompt_token_ids": ids}
            if media:
                prompts[index] |= {
                    "multi_modal_data": media,
                    "mm_processor_kwargs": {"do_resize": False, "do_sample_frames": False},
                }
        return prompts, problems

    def _problem(self, request: VlmRequest, ids: Sequence[int], room: int) -> str | None:
        found = media_problem(request, ids, self._picture_id, self._clip_id, max_pixels=self.max_pixels)
        if found is not None:
            return found
        frames = [(1, p) for p in request.images] + [(-(-len(clip) // 2), clip) for clip in request.clips]
        cells = (n * round(m.shape[-3] / self._cell) * round(m.shape[-2] / self._cell) for n, m in frames)
        needed = len(ids) - len(frames) + sum(max(1, num) for num in cells) + room
        if needed > self.max_tokens:
            return f"too long: it needs {needed} tokens, the model takes {self.max_tokens}"
        return None


def _generation(spoken: Any) -> Generation:
    """What vLLM calls a completion."""
    said = zip(spoken.token_ids, spoken.logprobs)
    return Generation(
        text=spoken.text,
        token_logprobs=tuple(entry[token].logprob for token, entry in said),
        truncated=spoken.finish_reason == "length",
    )


def _with_times(clip: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """A clip whose frames are half a second apart, so that a pair of frames is a second, as in process."""
    frames = len(clip)
    times = {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "frames",
        "do_sample_frames": False,
    }
    return clip, times
