"""Janus: one decoder with a head, an embedding and an aligner of its own for image codes.

Its text ids and its codes are two vocabularies. Here they stand in one joint id space, codes behind the text
ids, so that the engine and the trainer treat it as any other policy. Pictures that it is shown go through
its vision encoder; pictures that it draws are codes of its VQ model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.models.janus.modeling_janus import JanusForConditionalGeneration

from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer, pixels_from_uint8
from unirl.policies.policy import EVERY_ID, Policy
from unirl.policies.vocabulary import JointVocabulary
from unirl.types import Direction, Prompt

__all__ = ["JanusPolicy"]


class JanusPolicy(Policy):
    """transformers' Janus as a policy. The vision encoder and the VQ model are frozen."""

    def __init__(self, lm: JanusForConditionalGeneration, vocabulary: JointVocabulary) -> None:
        """Take a model over.

        Raises:
            ConfigError: If the grid's codes begin inside the text ids, or are not those of the VQ model.
        """
        config: Any = lm.config
        grid, text_ids = vocabulary.grid, int(lm.lm_head.out_features)
        codes, side = int(config.vq_config.num_embeddings), int(config.vq_config.num_patches)
        if grid.offset < text_ids:
            raise ConfigError(
                f"image codes start at id {grid.offset}, the text head has {text_ids} ids; "
                f"set the grid's offset to {text_ids}"
            )
        if (grid.num_codes, grid.rows, grid.columns) != (codes, side, side):
            raise ConfigError(
                f"the grid has {grid.rows} x {grid.columns} places for {grid.num_codes} codes, the VQ model "
                f"of this Janus {side} x {side} for {codes}; write the grid that belongs to the model"
            )
        super().__init__(lm, vocabulary, num_ids=vocabulary.size)
        self.picture_id = int(config.image_token_id)
        """Placeholder of one vector of a picture that is shown. Never allowed in a response."""
        self.picture_length = int(config.vision_config.num_image_tokens)
        self.get_buffer("masks_text")[:, self.picture_id] = False
        lm.model.vision_model.requires_grad_(False)
        lm.model.vqmodel.requires_grad_(False)

    @property
    def decoder_config(self) -> PretrainedConfig:
        """Configuration of the language model."""
        config: PretrainedConfig = self.lm.config.text_config
        return config

    def image_tokenizer(self) -> ImageTokenizer:
        """The model's own VQ model, which turns its codes into pictures."""
        return ImageTokenizer(self._model.vqmodel)

    def apart(self) -> list[nn.Module]:
        """The VQ model."""
        return [self._model.vqmodel]

    def sometimes(self) -> list[nn.Parameter]:
        """Heads, aligners and embeddings outside of the language model."""
        always = {id(parameter) for parameter in self.trunk.parameters()}
        return [parameter for parameter in self.trained_parameters() if id(parameter) not in always]

    @property
    def _model(self) -> Any:
        return self.lm.model

    def embed(self, ids: Tensor, pictures: Tensor | None = None) -> Tensor:
        """Turn ids (B, L) into vectors (B, L, D): words, codes, and pictures through the vision encoder.

        Raises:
            ConfigError: If the placeholders in `ids` are not those of `pictures`.
        """
        model, offset = self._model, self.vocabulary.grid.offset
        is_code = ids >= offset
        vectors: Tensor = model.get_input_embeddings()(ids.masked_fill(is_code, self.vocabulary.pad))
        if bool(is_code.any()):
            drawn = model.generation_aligner(model.generation_embeddings(ids[is_code] - offset))
            vectors = vectors.masked_scatter(is_code[..., None], drawn.to(vectors.dtype))
        is_shown = ids == self.picture_id
        if pictures is None and not bool(is_shown.any()):
            return vectors
        features = self._features(is_shown.sum(1), pictures)
        return vectors.masked_scatter(is_shown[..., None], features.to(vectors.dtype))

    def _features(self, num_places_B: Tensor, pictures: Tensor | None) -> Tensor:
        """Vectors (K, D) for the placeholders of all rows, row by row."""
        counts = (num_places_B // self.picture_length).tolist()
        held = 0 if pictures is None else len(pictures)
        repeats = sum(counts) // held if held else 0
        by_prompt = counts[::repeats] if repeats else []
        fits = bool((num_places_B % self.picture_length == 0).all()) and sum(by_prompt) == held
        if pictures is None or not fits or [c for c in by_prompt for _ in range(repeats)] != counts:
            raise ConfigError(
                f"the rows have places for {counts} pictures of {self.picture_length} vectors, {held} "
                "pictures were given; pass what `pictures` gives for the prompts of these rows"
            )
        features = self._model.get_image_features(pictures.to(self.dtype)).pooler_output
        of_prompt = features.split(by_prompt)
        return torch.cat([part.flatten(0, 1) for part in of_prompt for _ in range(repeats)])

    @property
    def trunk(self) -> nn.Module:
        """The language model without its head."""
        return cast(nn.Module, self._model.language_model)

    def logits(self, hidden: Tensor, direction: Direction, ids: slice = EVERY_ID) -> Tensor:
        """Apply the head of the direction; ids of the other one get 0 and are never allowed."""
        if direction == "text":
            text: Tensor = self.lm.lm_head(hidden)
            return F.pad(text, (0, self.vocabulary.size - text.shape[-1]))[..., ids]
        return F.pad(self._model.generation_head(hidden), (self.vocabulary.grid.offset, 0))[..., ids]

    def unconditional_ids(self, prompt: Prompt) -> list[int]:
        """The prompt with pads in place of its words, as Janus was trained: the length stays."""
        if prompt.direction == "text":
            return super().unconditional_ids(prompt)
        vocabulary = self.vocabulary
        start = vocabulary.start_of_picture
        conditions = len(self.prompt_ids(prompt)) - 1 - len(start)
        return [vocabulary.bos, *[vocabulary.pad] * conditions, *start]

    def pictures(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """Pixels (N, 3, H, W) in [-1, 1] of the pictures that the prompts show, in order.

        Raises:
            ConfigError: If a picture has not the side that the vision encoder takes.
        """
        shown = [image for prompt in prompts for image in self._shown_images(prompt)]
        if not shown:
            return None
        side = int(self.lm.config.vision_config.image_size)
        wrong = [image.shape for image in shown if image.shape != (side, side, 3)]
        if wrong:
            raise ConfigError(
                f"the vision encoder takes pictures of {side} x {side} pixels, found {wrong[0]}; "
                "resize them where the prompts are made"
            )
        return pixels_from_uint8(np.stack(shown)).to(self.device)

    def picture_key(self, prompt: Prompt) -> str:
        """SHA-256 of the pixels that the prompt shows."""
        digest = hashlib.sha256()
        for image in self._shown_images(prompt):
            digest.update(image.tobytes())
        return digest.hexdigest()

    def _shown_images(self, prompt: Prompt) -> list[np.ndarray]:
        shown = [] if prompt.context_images is None else list(prompt.context_images)
        if prompt.direction == "text" and prompt.image is not None:
            shown.append(prompt.image)
        if prompt.direction == "text" and not shown:
            raise ConfigError(f"{prompt.key}: a prompt that is answered with text needs its picture")
        return shown

    def _shown_ids(self, prompt: Prompt) -> list[int]:
        vocabulary = self.vocabulary
        places = [vocabulary.begin_image, *[self.picture_id] * self.picture_length, vocabulary.end_image]
        return places * len(self._shown_images(prompt))

    @classmethod
    def load(
        cls, directory: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> JanusPolicy:
        """Read what `save` wrote, or a Janus of transformers with an image grid beside it."""
        lm = JanusForConditionalGeneration.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention
        )
        return cls(lm, JointVocabulary.load(directory))._load_critic(directory)
