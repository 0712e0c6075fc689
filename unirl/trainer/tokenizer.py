"""Training of the image tokenizer.

Two phases. First the encoder and decoder learn to reconstruct without a codebook, on the unit sphere where
the codes will live. Then the codebook is drawn from what the encoder says and follows it by an exponential
moving average, while rarely used codes are moved to where they are needed; so no code stays dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.janus.modeling_janus import JanusVQVAE

from unirl.algorithms.schedule import learning_rate_factor
from unirl.policies.image_tokenizer import ImageTokenizer, ImageTokenizerConfig

__all__ = ["TokenizerReport", "train_image_tokenizer"]

COMMITMENT = 0.25
CODEBOOK_DECAY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerReport:
    """What the training reached, on the last batches."""

    steps: int
    mean_squared_error: float
    """Of pixels in [-1, 1], mean over the last tenth of the steps."""
    codes_used: int
    """Codes that the last tenth of the steps used at least once."""
    num_codes: int


def train_image_tokenizer(
    batches: Iterable[Tensor],
    config: ImageTokenizerConfig,
    *,
    steps: int,
    learning_rate: float = 2e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[ImageTokenizer, TokenizerReport]:
    """Train a JanusVQVAE on pictures.

    Args:
        batches: Endless float (B, 3, H, W) in [-1, 1].
        config: Size of the tokenizer.
        steps: Optimizer steps. The first quarter runs without a codebook.
        learning_rate: Peak of AdamW, after a warm-up over the first twentieth.
        seed: Seeds the initial weights and the choice of codes.
        on_step: Called with (step, loss) after each step.

    Returns:
        The frozen tokenizer and what it reached.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JanusVQVAE(config.janus()).train().to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    codebook = _Codebook(config.num_codes, config.code_dim, generator)
    model.quantize.embedding.weight.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step, warmup_steps=max(steps // 20, 1), total_steps=steps, decay="cosine", floor=0.05
        ),
    )
    codes_from, tail_from = steps // 4, steps - max(steps // 10, 1)
    errors: list[float] = []
    used: set[int] = set()
    for step, pixels in zip(range(steps), batches, strict=False):
        pixels = F.pixel_unshuffle(pixels, config.fold).contiguous(memory_format=torch.channels_last)
        latents = F.normalize(model.quant_conv(model.encoder(pixels)), dim=1)
        quantized, commitment = latents, latents.new_zeros(())
        if step >= codes_from:
            flat = latents.detach().permute(0, 2, 3, 1).reshape(-1, config.code_dim)
            codes = codebook.update(flat)
            vectors = (
                codebook.vectors[codes].view(pixels.shape[0], *latents.shape[2:], -1).permute(0, 3, 1, 2)
            )
            commitment = (latents - vectors).square().sum(dim=1).mean()
            quantized = latents + (vectors - latents).detach()
            if step >= tail_from:
                used.update(codes.unique().tolist())
        decoded = model.decoder(model.post_quant_conv(quantized))
        error = F.mse_loss(decoded, pixels)
        loss = error + COMMITMENT * commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step >= tail_from:
            errors.append(float(error.detach()))
        on_step(step, float(loss.detach()))
    with torch.no_grad():
        model.quantize.embedding.weight.copy_(codebook.vectors)
    report = TokenizerReport(
        steps=steps,
        mean_squared_error=sum(errors) / len(errors),
        codes_used=len(used),
        num_codes=config.num_codes,
    )
    return ImageTokenizer(model.to(memory_format=torch.contiguous_format)), report


class _Codebook:
    """Unit vectors that follow the latents assigned to them by an exponential moving average.

    Source: Razavi et al. 2019, "Generating Diverse High-Fidelity Images with VQ-VAE-2", equation 2 for the
    moving average; codes that fall below a twentieth of the fair share are drawn anew from the batch.
    """

    def __init__(self, num_codes: int, dim: int, generator: torch.Generator) -> None:
        self.vectors = torch.empty(0, dim)
        self._num_codes = num_codes
        self._generator = generator
        self._counts = torch.zeros(num_codes)
        self._sums = torch.zeros(num_codes, dim)

    def update(self, latents: Tensor) -> Tensor:
        """Assign float (N, D) unit latents to codes and move the codes; return int64 (N,)."""
        if not len(self.vectors):
            self.vectors = self._draw(latents, self._num_codes)
            self._sums, self._counts = self.vectors.clone(), torch.ones(self._num_codes)
        codes = (latents @ self.vectors.T).argmax(dim=1)
        counts = torch.bincount(codes, minlength=self._num_codes).to(latents.dtype)
        sums = torch.zeros_like(self._sums).index_add_(0, codes, latents)
        self._counts.mul_(CODEBOOK_DECAY).add_(counts, alpha=1 - CODEBOOK_DECAY)
        self._sums.mul_(CODEBOOK_DECAY).add_(sums, alpha=1 - CODEBOOK_DECAY)
        rare = self._counts < 0.05 * len(latents) / self._num_codes
        if rare.any():
            self._sums[rare] = self._draw(latents, int(rare.sum()))
            self._counts[rare] = 1.0
        self.vectors = F.normalize(self._sums, dim=1)
        return codes

    def _draw(self, latents: Tensor, count: int) -> Tensor:
        return latents[torch.randint(len(latents), (count,), generator=self._generator)].clone()
