"""What becomes of the bytes of one picture or video: checked, described, and changed where that was asked."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

from datapipe.decode.facts import ImageFacts
from datapipe.decode.image import check_image, decode_frames, decode_image_with_facts, read_image_facts
from datapipe.decode.phash import perceptual_hash
from datapipe.decode.resize import resize_pixels
from datapipe.decode.video import Container, scan_video, sniff_container
from datapipe.errors import DecodeError
from datapipe.media_rules import Encoding, MediaRules, TensorRule
from datapipe.sources.column_kinds import Scalar

__all__ = ["MEDIA_KINDS", "Media", "judge_media"]

MEDIA_KINDS: Final[dict[str, str]] = {
    "width": "int",  # pixels of the blob, after rotation
    "height": "int",
    "format": "string",  # of the blob, by content; the container of a video
    "mode": "string",  # of the file as it came: Pillow's name
    "had_alpha": "bool",  # of the file as it came
    "exif_orientation": "int",  # of the file as it came
    "n_frames": "int",  # frames or pages of the file as it came; frames of a video that really decode
    "frame": "int",  # which of them the blob shows; null where the blob is the whole file
    "phash": "string",  # perceptual hash, 16 hexadecimal digits
    "source_hash": "string",  # xxh3_128 of the file as it came, where the blob is another encoding
    "header_frames": "int",  # what the header of a video claims
    "duration_s": "float",
    "fps": "float",  # frames per second in the mean
    "codec": "string",
    "rotation": "int",  # degrees clockwise that were applied to a video
    "had_audio": "bool",
    "is_vfr": "bool",  # the frames do not lie on one even grid of times
    "damaged_fraction": "float",  # of the frames of a video
}

_PNG: Final = Encoding(format="png", quality=None)
_JPEG: Final = Encoding(format="jpeg", quality=95)
_PICTURE_MAGIC: Final = (b"\xff\xd8\xff", b"\x89PNG")  # told apart from videos by their first bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What is stored of one picture or video."""

    kind: Literal["image", "video"]
    blob: bytes
    columns: Mapping[str, Scalar]  # for the index; names and types in MEDIA_KINDS
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


def judge_media(data: bytes, rules: MediaRules) -> list[Media]:
    """Check a file completely and make what is stored of it: one entry, or one for each frame.

    Raises:
        DecodeError: With a reason code, when the file cannot be used.
    """
    container = None if data.startswith(_PICTURE_MAGIC) else sniff_container(data)
    if container is not None:
        return [_judge_video(data, container, rules)]
    if rules.trust:
        facts = read_image_facts(data, max_pixels=rules.max_pixels)
        _refuse_frames(facts, rules)
        return [_as_it_came(data, facts, None)]
    if rules.frames == "all":
        facts = read_image_facts(data, max_pixels=rules.max_pixels)
        if _is_multi_frame(facts):
            return _judge_frames(data, facts, rules)
    if rules.needs_pixels:
        pixels, facts = decode_image_with_facts(
            data, background=rules.background, max_pixels=rules.max_pixels
        )
        _refuse_frames(facts, rules)
        return [_changed(data, pixels, facts, rules)]
    facts, phash = check_image(data, background=rules.background, max_pixels=rules.max_pixels)
    _refuse_frames(facts, rules)
    return [_as_it_came(data, facts, phash)]


def _is_multi_frame(facts: ImageFacts) -> bool:
    # The further pictures of a camera's JPEG are previews and second lenses, not a sequence.
    return facts.n_frames > 1 and facts.format != "jpeg"


def _refuse_frames(facts: ImageFacts, rules: MediaRules) -> None:
    if rules.frames == "skip" and _is_multi_frame(facts):
        raise DecodeError(
            "multi_frame", f"the {facts.format} has {facts.n_frames} frames; frames=first takes the first"
        )


def _as_it_came(data: bytes, facts: ImageFacts, phash: str | None) -> Media:
    return Media(kind="image", blob=data, columns=_fact_columns(facts, phash), notes=facts.notes)


def _fact_columns(facts: ImageFacts, phash: str | None) -> dict[str, Scalar]:
    columns: dict[str, Scalar] = {
        "width": facts.width,
        "height": facts.height,
        "format": facts.format,
        "mode": facts.mode,
        "had_alpha": facts.had_alpha,
        "exif_orientation": facts.exif_orientation,
        "n_frames": facts.n_frames,
    }
    if facts.n_frames > 1:
        columns["frame"] = 0
    if phash is not None:
        columns["phash"] = phash
    return columns


def _judge_frames(data: bytes, facts: ImageFacts, rules: MediaRules) -> list[Media]:
    frames = decode_frames(data, background=rules.background, max_pixels=rules.max_pixels)
    return [
        _reencoded(data, pixels, facts, rules, rules.encoding or _PNG, {"frame": number})
        for number, pixels in enumerate(frames)
    ]


def _changed(data: bytes, pixels: NDArray[np.uint8], facts: ImageFacts, rules: MediaRules) -> Media:
    size = pixels.shape[:2]
    is_resized = rules.resize is not None and rules.resize.size_for(*size) != size
    if rules.encoding is None and not is_resized:
        columns = _fact_columns(facts, perceptual_hash(pixels))
        tensors = _tensors(pixels, rules.tensors)
        return Media(kind="image", blob=data, columns=columns, notes=facts.notes, tensors=tensors)
    encoding = rules.encoding or (_JPEG if facts.format == "jpeg" else _PNG)
    return _reencoded(data, pixels, facts, rules, encoding, {})


def _reencoded(
    data: bytes,
    pixels: NDArray[np.uint8],
    facts: ImageFacts,
    rules: MediaRules,
    encoding: Encoding,
    columns: Mapping[str, Scalar],
) -> Media:
    height, width = pixels.shape[:2]
    size = (height, width) if rules.resize is None else rules.resize.size_for(height, width)
    own: dict[str, Scalar] = {
        "width": size[1],
        "height": size[0],
        "format": encoding.format,
        "source_hash": xxhash.xxh3_128_hexdigest(data),
    }
    return Media(
        kind="image",
        blob=_encode(resize_pixels(pixels, size), encoding),
        columns={**_fact_columns(facts, perceptual_hash(pixels)), **own, **columns},
        notes=facts.notes,
        tensors=_tensors(pixels, rules.tensors),
    )


def _encode(pixels: NDArray[np.uint8], encoding: Encoding) -> bytes:
    buffer = io.BytesIO()
    options = {} if encoding.quality is None else {"quality": encoding.quality}
    Image.fromarray(pixels).save(buffer, encoding.format.upper(), **options)
    return buffer.getvalue()


def _tensors(pixels: NDArray[np.uint8], rules: tuple[TensorRule, ...]) -> dict[str, NDArray[np.generic]]:
    made: dict[str, NDArray[np.generic]] = {}
    for rule in rules:
        planes = resize_pixels(pixels, (rule.height, rule.width)).transpose(2, 0, 1)
        if rule.dtype != "uint8":
            scaled = planes.astype(np.float32) * np.float32(1 / 127.5) - np.float32(1)
            made[rule.name] = np.ascontiguousarray(scaled, dtype=rule.dtype)
        else:
            made[rule.name] = np.ascontiguousarray(planes)
    return made


def _judge_video(data: bytes, container: Container, rules: MediaRules) -> Media:
    if rules.trust:
        if container.is_sound:
            raise DecodeError("no_video_stream", f"a {container.name} file, which holds sound only")
        return Media(kind="video", blob=data, columns={"format": container.name})
    info = scan_video(data, max_pixels=rules.max_pixels)
    columns: dict[str, Scalar] = {
        "width": info.width,
        "height": info.height,
        "format": info.container,
        "n_frames": info.frames,
        "header_frames": info.header_frames,
        "duration_s": float(info.duration_s),
        "fps": float(info.fps),
        "codec": info.codec,
        "rotation": info.rotation,
        "had_audio": info.has_audio,
        "is_vfr": info.is_vfr,
        "damaged_fraction": float(info.damaged_fraction),
    }
    return Media(kind="video", blob=data, columns=columns, notes=info.notes)
