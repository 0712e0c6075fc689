from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.models.janus.modeling_janus import JanusVQVAE

from unirl.errors import ConfigError, ShapeError
from unirl.policies.image_tokenizer import (
    ImageTokenizer,
    ImageTokenizerConfig,
    pixels_from_uint8,
    uint8_from_pixels,
)


def make(**sizes: object) -> ImageTokenizer:
    config = ImageTokenizerConfig(
        **{"image_size": 16, "num_codes": 16, "code_dim": 4, "base_channels": 32} | sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ImageTokenizer(JanusVQVAE(config.janus()))


def pictures(num: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ({"fold": 4}, 4),
        ({"fold": 8}, 2),
        ({"fold": 1, "channel_multiplier": (1, 2)}, 8),
        ({"fold": 2, "channel_multiplier": (1, 1, 1)}, 2),
    ],
)
def test_sizes_follow_from_the_configuration(sizes: dict[str, object], grid: int) -> None:
    tokenizer = make(**sizes)
    config = ImageTokenizerConfig(image_size=16, **sizes)
    assert config.grid_size == tokenizer.grid_size == grid
    assert tokenizer.image_size == 16 and tokenizer.num_codes == 16
    assert tokenizer.fold == config.fold
    codes = tokenizer.encode(pixels_from_uint8(pictures(3, 16)))
    assert codes.shape == (3, grid**2) and codes.dtype == torch.int64
    assert codes.min() >= 0 and codes.max() < 16
    decoded = tokenizer.decode(codes)
    assert decoded.shape == (3, 3, 16, 16) and decoded.dtype == torch.float32
    assert decoded.min() >= -1 and decoded.max() <= 1


def test_without_folding_it_is_transformers_own_model() -> None:
    tokenizer = make(fold=1, channel_multiplier=(1, 1))
    pixels = pixels_from_uint8(pictures(2, 16))
    with torch.no_grad():
        codes = tokenizer.model.encode(pixels).image_tokens.view(2, -1)
        decoded = tokenizer.model.decode(codes)
    assert tokenizer.encode(pixels).equal(codes)
    assert tokenizer.decode(codes).equal(decoded.clamp(-1, 1))


def test_folding_is_pixel_unshuffle_before_and_shuffle_behind() -> None:
    tokenizer = make(fold=4)
    pixels = pixels_from_uint8(pictures(2, 16))
    with torch.no_grad():
        codes = tokenizer.model.encode(F.pixel_unshuffle(pixels, 4)).image_tokens.view(2, -1)
    assert tokenizer.encode(pixels).equal(codes)


def test_codes_stand_row_by_row() -> None:
    """Code h * columns + w belongs to the latent of row h and column w, when encoding and when decoding."""
    tokenizer = make()
    model, pixels = tokenizer.model, pixels_from_uint8(pictures(2, 16))
    with torch.no_grad():
        latents = model.quant_conv(model.encoder(F.pixel_unshuffle(pixels, 4))).permute(0, 2, 3, 1)
        vectors = model.quantize.embedding.weight
        nearest = (latents[..., None, :] - vectors).square().sum(-1).argmin(-1)
        codes = tokenizer.encode(pixels)
        grid = F.normalize(vectors, dim=1)[codes].view(2, 4, 4, -1).permute(0, 3, 1, 2)
        decoded = F.pixel_shuffle(model.decoder(model.post_quant_conv(grid)), 4).clamp(-1, 1)
    assert codes.view(2, 4, 4).equal(nearest)
    torch.testing.assert_close(tokenizer.decode(codes), decoded, atol=1e-5, rtol=0)


def test_pictures_are_encoded_alike_alone_and_in_company() -> None:
    tokenizer = make()
    pixels = pixels_from_uint8(pictures(5, 16))
    together = tokenizer.encode(pixels)
    assert torch.cat([tokenizer.encode(p[None]) for p in pixels]).equal(together)
    alone = torch.cat([tokenizer.decode(c[None]) for c in together])
    torch.testing.assert_close(alone, tokenizer.decode(together), atol=1e-5, rtol=0)


def test_save_and_load_round_trip_with_transformers_class(tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    pixels = pixels_from_uint8(pictures(3, 16))
    loaded = ImageTokenizer.load(tmp_path)
    assert loaded.encode(pixels).equal(tokenizer.encode(pixels))
    model = JanusVQVAE.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        codes = model.encode(F.pixel_unshuffle(pixels, 4)).image_tokens.view(3, -1)
    assert codes.equal(tokenizer.encode(pixels))


def test_it_is_frozen() -> None:
    tokenizer = make()
    assert not tokenizer.model.training
    assert not any(p.requires_grad for p in tokenizer.model.parameters())


@pytest.mark.parametrize("shape", [(2, 3, 12, 16), (3, 16, 16), (2, 1, 16, 16), (2, 3, 32, 32)])
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"pixels must be \(B, 3, 16, 16\), found \(" + str(shape[0])):
        make().encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 15), (16,), (2, 4, 4)])
def test_codes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"codes must be \(B, 16\), found \("):
        make().decode(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("code", [-1, 16])
def test_codes_outside_the_codebook_are_refused(code: int) -> None:
    """transformers would decode -1 as the last code and end in an index error for the other."""
    codes = torch.zeros(1, 16, dtype=torch.int64)
    codes[0, 3] = code
    with pytest.raises(ShapeError, match=rf"code {code} .*16 codes"):
        make().decode(codes)


def test_a_side_that_is_no_multiple_of_the_patch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"image_size 30 is not a multiple of 8"):
        ImageTokenizerConfig(image_size=30, fold=4, channel_multiplier=(1, 1))


def test_a_width_that_has_no_32_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_channels must be a multiple of 32, found 48"):
        ImageTokenizerConfig(base_channels=48)


def test_pixels_go_to_bytes_and_back_exactly() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    pixels = pixels_from_uint8(images)
    assert pixels.shape == (1, 3, 16, 16)
    assert float(pixels.min()) == -1.0 and float(pixels.max()) == 1.0
    assert (uint8_from_pixels(pixels) == images).all()


def test_channels_stay_in_their_order() -> None:
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[0, 0, 1] = (255, 128, 0)
    pixels = pixels_from_uint8(image)
    assert pixels[0, :, 0, 1].tolist() == pytest.approx([1.0, 128 / 127.5 - 1, -1.0], abs=1e-6)


def test_pixels_out_of_range_are_clipped() -> None:
    image = uint8_from_pixels(torch.tensor([-3.0, 0.0, 9.0]).view(1, 3, 1, 1))
    assert image.tolist() == [[[[0, 128, 255]]]]


@pytest.mark.parametrize(
    "images",
    [np.zeros((1, 4, 4, 3), np.float32), np.zeros((4, 4, 3), np.uint8), np.zeros((1, 4, 4, 4), np.uint8)],
)
def test_what_is_no_picture_is_refused(images: np.ndarray) -> None:
    with pytest.raises(ShapeError, match=r"pictures must be uint8 \(B, H, W, 3\)"):
        pixels_from_uint8(images)


def test_toy_pictures_have_different_codes(toy: SimpleNamespace) -> None:
    images = np.stack([toy.picture(n) for n in range(16)])
    codes = toy.make_tokenizer().encode(pixels_from_uint8(images))
    assert len(codes.unique(dim=0)) >= 8


def test_the_hash_tells_weights_apart(tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(tmp_path / "one")
    assert ImageTokenizer.load(tmp_path / "one").weights_hash() == tokenizer.weights_hash()
    before = tokenizer.weights_hash()
    next(iter(tokenizer.model.parameters())).data.view(-1)[0] += 1e-3
    assert tokenizer.weights_hash() != before and len(before) == 64
