"""A Qwen2.5-VL of transformers, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from unirl.errors import ShapeError
from unirl.model_folder import QWEN_VL, require_model
from unirl.rewards.backends.base import (
    AnswerLogprobs,
    Generation,
    VlmRequest,
    finite_answers,
    in_order,
)
from unirl.rewards.backends.identity import directory_identity, network_identity
from unirl.rewards.backends.preparing import Prepared, Preparer
from unirl.rewards.backends.prompts import PaddedPrompts, answer_sequences
from unirl.rewards.backends.speaking import speak
from unirl.rewards.backends.vision import PACKED_ATTENTION, Grid, VisionLayout, patches

__all__ = ["TransformersBackend"]


class TransformersBackend:
    """Answers with a Qwen2.5-VL in this process. Rows are padded on the left and read in batches.

    Args:
        model: The network; its vision attention is switched to a packed form.
        tokenizer: With the placeholders of pictures and clips in its vocabulary.
        mean: Of each colour channel, as the picture processor subtracts it, in [0, 1].
        deviation: Of each colour channel, as the picture processor divides by it.
        batch_size: Requests in a forward.
        max_tokens: Longest prompt; a longer one is a problem, and never cut. None: what the model was made
            for.
        max_pixels: Largest picture.
        identity: Names the weights; None hashes them when it is first asked for.
    """

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mean: Sequence[float],
        deviation: Sequence[float],
        batch_size: int = 64,
        max_tokens: int | None = None,
        max_pixels: int = 4_000_000,
        identity: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.mean, self.deviation = tuple(mean), tuple(deviation)
        self.preparer = Preparer(
            tokenizer,
            model.config,
            max_tokens=max_tokens or model.config.get_text_config().max_position_embeddings,
            max_pixels=max_pixels,
        )
        self._identity = identity
        self._vision: Any = model.config.vision_config
        self._layouts: dict[Grid, VisionLayout] = {}
        model.set_attn_implementation({"vision_config": PACKED_ATTENTION})

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        batch_size: int = 64,
        max_tokens: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> TransformersBackend:
        """Read a model directory in the format of transformers, in eval mode.

        Raises:
            ConfigError: If there is no Qwen2.5-VL in it.
        """
        directory = Path(directory)
        require_model(directory, QWEN_VL)
        identity = f"transformers/{directory_identity(directory)}"
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=dtype).eval().to(device)
        processor = AutoImageProcessor.from_pretrained(directory)
        return cls(
            model,
            AutoTokenizer.from_pretrained(directory),
            mean=processor.image_mean,
            deviation=processor.image_std,
            batch_size=batch_size,
            max_tokens=max_tokens,
            identity=identity,
        )

    @property
    def identity(self) -> str:
        """Names the network and its weights."""
        return self._hashed if self._identity is None else self._identity

    @cached_property
    def _hashed(self) -> str:
        return f"transformers/{network_identity(self.model)}"

    def close(self) -> None:
        """Nothing to give back before the object goes."""

    @torch.inference_mode()
    def answer_logprobs(
        self, requests: Sequence[VlmRequest], answers: Sequence[Sequence[str]]
    ) -> AnswerLogprobs:
        """Say how likely each answer comes next; see `VlmBackend`."""
        sequences = answer_sequences(self.tokenizer, answers)
        longest = max(len(ids) for group in sequences for ids in group)
        prepared, problems = self.prepare(requests, room=longest - 1)
        logprobs = np.full((len(requests), len(answers)), np.nan)
        for batch in self._batches(prepared):
            logprobs[batch] = self._answers([prepared[index] for index in batch], sequences)
        return finite_answers(logprobs, problems)

    @torch.inference_mode()
    def token_logprobs(
        self, requests: Sequence[VlmRequest], *, token_ids: Sequence[int] = (), top: int = 0
    ) -> list[dict[int, float] | str]:
        """Log-probabilities of the tokens that are named, or of the most likely ones; or what is wrong.

        Args:
            requests: B questions.
            token_ids: Tokens to name.
            top: How many of the most likely tokens to name where `token_ids` is empty.
        """
        prepared, problems = self.prepare(requests)
        named: dict[int, dict[int, float] | str] = dict(problems)
        for batch in self._batches(prepared):
            rows = [prepared[index] for index in batch]
            logits = self.read(self.padded(rows), self.look(rows)).logits[:, 0].double().log_softmax(-1)
            for index, row in zip(batch, logits):
                ids = torch.tensor(list(token_ids)) if token_ids else row.topk(max(1, top)).indices
                named[index] = dict(zip(ids.tolist(), row[ids].tolist()))
        return [named[index] for index in range(len(requests))]

    @torch.inference_mode()
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
        prepared, problems = self.prepare(requests, room=max_new_tokens)
        said: dict[int, Generation] = {}
        for batch in self._batches(prepared):
            rows = [prepared[index] for index in batch]
            spoken = speak(
                self,
                self.padded(rows),
                self.look(rows),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seeds=[(seed, index) for index in batch],
                stop=stop,
            )
            said |= dict(zip(batch, spoken))
        return in_order(said, problems)

    def prepare(
        self, requests: Sequence[VlmRequest], *, room: int = 0
    ) -> tuple[dict[int, Prepared], dict[int, str]]:
        """Make requests ready; see `Preparer.prepare`."""
        return self.preparer.prepare(requests, room=room)

    def padded(self, rows: Sequence[Prepared]) -> PaddedPrompts:
        """Pad prompts on the left, with their rotary positions."""
        return self.preparer.padded(rows)

    def look(self, rows: Sequence[Prepared]) -> dict[str, Tensor]:
        """See each different medium once: features (tokens, D) of all rows' pictures and of their clips."""
        place: dict[tuple[Grid, bytes], int] = {}
        media: list[np.ndarray] = []
        uses: dict[str, list[int]] = {"image": [], "video": []}
        for row in rows:
            for (_, per_second, _), medium in zip(row.layout, row.media):
                key = (self.preparer.grid(medium), medium.tobytes())
                if key not in place:
                    place[key] = len(media)
                    media.append(medium)
                uses["video" if per_second else "image"].append(place[key])
        by_grid: dict[Grid, list[int]] = {}
        for (grid, _), number in place.items():
            by_grid.setdefault(grid, []).append(number)
        seen: dict[int, Tensor] = {}
        for grid, numbers in by_grid.items():
            seen |= dict(zip(numbers, self._features(grid, np.stack([media[n] for n in numbers]))))
        return {kind: torch.cat([seen[n] for n in numbers]) for kind, numbers in uses.items() if numbers}

    def read(
        self, prompts: PaddedPrompts, features: dict[str, Tensor], *, keep: int = 1, use_cache: bool = False
    ) -> Any:
        """The network's output: float logits (B, keep, V) after the last `keep` tokens (0: all).

        Raises:
            ShapeError: If a row does not end in a real token, so that the last column is not its last token.
        """
        if not prompts.mask[:, -1].all():
            raise ShapeError("prompts must be padded on the left; a row ends in padding")
        device = self.model.device
        outputs: dict[str, Any] = {
            kind: BaseModelOutputWithPooling(pooler_output=(part,))  # type: ignore[arg-type]
            for kind, part in features.items()
        }
        return self.model(
            input_ids=torch.from_numpy(prompts.ids).to(device),
            attention_mask=None if prompts.mask.all() else torch.from_numpy(prompts.mask).to(device),
            position_ids=torch.from_numpy(prompts.positions).to(device),
            mm_encoder_outputs=outputs,
            logits_to_keep=keep,
            use_cache=use_cache,
        )

    def _batches(self, prepared: Mapping[int, Prepared]) -> Iterator[list[int]]:
        """Indices of at most `batch_size` prompts of about the same length."""
        order = sorted(prepared, key=lambda index: len(prepared[index].ids))
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def _answers(
        self, rows: Sequence[Prepared], sequences: Sequence[Sequence[tuple[int, ...]]]
    ) -> np.ndarray:
        """Float64 (B, N). The media are seen once; each different start of a longer spelling is read once."""
        features = self.look(rows)
        starts = sorted({sequence[:-1] for group in sequences for sequence in group})
        read: dict[tuple[int, ...], Tensor] = {}
        for start in starts:
            extended = [Prepared(ids=r.ids + start, layout=r.layout, media=r.media) for r in rows]
            logits = self.read(self.padded(extended), features, keep=len(start) + 1).logits
            read[start] = logits.double().log_softmax(-1)
        columns = []
        for group in sequences:
            spellings = [
                sum(read[ids[:-1]][:, place, token] for place, token in enumerate(ids)) for ids in group
            ]
            columns.append(torch.stack(spellings).logsumexp(0))  # type: ignore[arg-type]
        answered: np.ndarray = torch.stack(columns, dim=1).cpu().numpy()
        return answered

    def _features(self, grid: Grid, clips: np.ndarray) -> tuple[Tensor, ...]:
        layout = self._layouts.setdefault(grid, VisionLayout(grid, self._vision))
        device = self.model.device
        output = self.model.model.get_image_features(
            patches(clips, self._vision, self.mean, self.deviation).to(device),
            torch.tensor([grid] * len(clips)).to(device),
            **layout.repeated(len(clips), device),
        )
        return tuple(output.pooler_output)
