"""Pictures to discrete codes and back, on transformers' JanusVQVAE classes.

The public Janus weights load through the same class, and a tokenizer trained here loads with
`transformers.JanusVQVAE.from_pretrained`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from unirl.config import require_positive
from unirl.errors import ConfigError, ShapeError
from unirl.model_folder import IMAGE_TOKENIZER, require_model

__all__ = ["ImageTokenizer", "ImageTokenizerConfig", "pixels_from_uint8", "uint8_from_pixels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokenizerConfig:
    """Size of a tokenizer. The defaults are the toy size: 32x32 pictures, 8x8 codes out of 128."""

    image_size: int = 32
    """Side of the square picture, pixels."""
    num_codes: int = 128
    code_dim: int = 8
    fold: int = 4
    """Squares of fold x fold pixels become channels before the first convolution. 1 is the published model;
    more makes small pictures cheap."""
    base_channels: int = 32
    """Multiple of 32: the blocks normalise in 32 groups."""
    channel_multiplier: tuple[int, ...] = (1,)
    """One entry a resolution; each further entry halves the side."""
    num_res_blocks: int = 1

    def __post_init__(self) -> None:
        require_positive(self)
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size {self.image_size} is not a multiple of {self.patch_size}, "
                f"the side of the patch that one code stands for; change one of the two"
            )
        if self.base_channels % 32:
            raise ConfigError(f"base_channels must be a multiple of 32, found {self.base_channels}")

    @property
    def patch_size(self) -> int:
        """Side of the square of pixels that one code stands for."""
        return int(self.fold * 2 ** (len(self.channel_multiplier) - 1))

    @property
    def grid_size(self) -> int:
        """Rows, and columns, of codes."""
        return self.image_size // self.patch_size

    def janus(self) -> JanusVQVAEConfig:
        """The configuration of transformers' class."""
        return JanusVQVAEConfig(
            embed_dim=self.code_dim,
            num_embeddings=self.num_codes,
            in_channels=3 * self.fold**2,
            out_channels=3 * self.fold**2,
            latent_channels=self.base_channels * self.channel_multiplier[-1],
            base_channels=self.base_channels,
            channel_multiplier=list(self.channel_multiplier),
            num_res_blocks=self.num_res_blocks,
            num_patches=self.grid_size,
        )


def pixels_from_uint8(images: np.ndarray) -> Tensor:
    """Turn uint8 (B, H, W, 3) into float32 (B, 3, H, W) in [-1, 1]."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise ShapeError(f"pictures must be uint8 (B, H, W, 3), found {images.dtype} {images.shape}")
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def uint8_from_pixels(pixels: Tensor) -> np.ndarray:
    """Turn float (B, 3, H, W) in [-1, 1] into uint8 (B, H, W, 3), clipped and rounded."""
    scaled = pixels.detach().float().add(1.0).mul(127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


class ImageTokenizer:
    """A frozen VQ model with the two calls that the rest of the system needs."""

    def __init__(self, model: JanusVQVAE) -> None:
        self.model = model.eval().requires_grad_(False)

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""
        return int(self.model.config.num_embeddings)

    @property
    def grid_size(self) -> int:
        """Rows, and columns, of codes."""
        return int(self.model.config.num_patches)

    @property
    def image_size(self) -> int:
        """Side of the square picture, pixels."""
        return int(self.grid_size * self.fold * 2 ** (len(self.model.config.channel_multiplier) - 1))

    @property
    def fold(self) -> int:
        """Side of the squares of pixels that become channels before the first convolution."""
        return math.isqrt(self.model.config.in_channels // 3)

    def weights_hash(self) -> str:
        """SHA-256 of the names and values of all weights, 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return the codes of pictures, row by row.

        Args:
            pixels: Float (B, 3, H, W) in [-1, 1], H = W = image_size.

        Returns:
            int64 (B, grid_size ** 2), each in [0, num_codes).
        """
        side = self.image_size
        if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
            raise ShapeError(f"pixels must be (B, 3, {side}, {side}), found {tuple(pixels.shape)}")
        folded = F.pixel_unshuffle(pixels.to(self.model.device), self.fold)
        codes: Tensor = self.model.encode(folded).image_tokens.view(pixels.shape[0], -1)
        return codes

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Return float32 (B, 3, H, W) in [-1, 1], the pictures of int64 (B, grid_size ** 2) codes."""
        length = self.grid_size**2
        if codes.ndim != 2 or codes.shape[1] != length:
            raise ShapeError(f"codes must be (B, {length}), found {tuple(codes.shape)}")
        wrong = codes[(codes < 0) | (codes >= self.num_codes)]
        if len(wrong):
            raise ShapeError(f"code {int(wrong[0])} is none of the {self.num_codes} codes of this tokenizer")
        return F.pixel_shuffle(self.model.decode(codes.to(self.model.device)), self.fold).clamp(-1.0, 1.0)

    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors, as transformers does."""
        self.model.save_pretrained(directory)

    @classmethod
    def load(cls, directory: Path) -> ImageTokenizer:
        """Read what `save` wrote, or public weights of the same class.

        Raises:
            ConfigError: If the folder holds no image tokenizer.
        """
        require_model(directory, IMAGE_TOKENIZER)
        return cls(JanusVQVAE.from_pretrained(directory))
