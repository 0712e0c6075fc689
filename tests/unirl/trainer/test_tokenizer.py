from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from unirl.policies.image_tokenizer import ImageTokenizer, ImageTokenizerConfig, pixels_from_uint8
from unirl.trainer.tokenizer import TokenizerReport, train_image_tokenizer

CONFIG = ImageTokenizerConfig(image_size=8, num_codes=8, code_dim=4, base_channels=32)


def pixels(toy: SimpleNamespace) -> torch.Tensor:
    return pixels_from_uint8(np.stack([toy.picture(number) for number in range(16)]))


@pytest.fixture(scope="module")
def trained(toy: SimpleNamespace) -> tuple[ImageTokenizer, TokenizerReport, list[float]]:
    losses: list[float] = []
    tokenizer, report = train_image_tokenizer(
        repeat(pixels(toy)),
        CONFIG,
        steps=60,
        learning_rate=1e-2,
        on_step=lambda step, loss: losses.append(loss),
    )
    return tokenizer, report, losses


def test_it_learns_to_draw_what_it_sees(
    trained: tuple[ImageTokenizer, TokenizerReport, list[float]], toy: SimpleNamespace
) -> None:
    tokenizer, report, losses = trained
    assert len(losses) == report.steps == 60
    assert losses[-1] < 0.3 * losses[0]
    drawn = tokenizer.decode(tokenizer.encode(pixels(toy)))
    error = float(F.mse_loss(drawn, pixels(toy)))
    assert error < 0.5 * float(pixels(toy).var())
    assert error == pytest.approx(report.mean_squared_error, rel=0.5)


def test_codes_are_in_use_and_tell_pictures_apart(
    trained: tuple[ImageTokenizer, TokenizerReport, list[float]], toy: SimpleNamespace
) -> None:
    tokenizer, report, _ = trained
    codes = tokenizer.encode(pixels(toy))
    assert 4 <= len(codes.unique()) <= report.codes_used <= report.num_codes == 8
    assert len(codes.unique(dim=0)) >= 12


def test_the_codebook_lies_on_the_unit_sphere(
    trained: tuple[ImageTokenizer, TokenizerReport, list[float]],
) -> None:
    """transformers picks codes by distance and the training by angle; on the sphere the two agree."""
    norms = trained[0].model.quantize.embedding.weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(8), atol=1e-5, rtol=0)


def test_the_result_depends_on_the_seed_alone(toy: SimpleNamespace) -> None:
    def train(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        tokenizer, _ = train_image_tokenizer(repeat(pixels(toy)), CONFIG, steps=8, seed=seed)
        return tokenizer.decode(tokenizer.encode(pixels(toy)))

    assert train(1, noise=1).equal(train(1, noise=2))
    assert not train(1, noise=1).equal(train(2, noise=1))


def test_the_tokenizer_comes_out_frozen(
    trained: tuple[ImageTokenizer, TokenizerReport, list[float]],
) -> None:
    model = trained[0].model
    assert not model.training and not any(p.requires_grad for p in model.parameters())
