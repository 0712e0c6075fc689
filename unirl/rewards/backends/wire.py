"""Requests and answers in the form of OpenAI's chat completions, as clients write and servers read them."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from datapipe.decode import decode_image
from datapipe.errors import DecodeError
from unirl.rewards.backends.base import CLIP_MARK, IMAGE_MARK, VlmRequest

__all__ = [
    "TOKEN_ID",
    "WireError",
    "first_choice",
    "first_token_logprobs",
    "messages_of",
    "request_of",
    "said_logprobs",
]

TOKEN_ID = "token_id:"
"""How servers write a token when they are asked for `return_tokens_as_token_ids`."""
_MARKS = re.compile(f"({re.escape(IMAGE_MARK)}|{re.escape(CLIP_MARK)})")
_PNG, _FRAMES = "data:image/png;base64,", "data:video/jpeg;base64,"


class WireError(ValueError):
    """A message that does not say what it should."""


def messages_of(request: VlmRequest) -> list[dict[str, Any]]:
    """The request as chat messages; pictures travel as PNG, clips as their frames, both without loss.

    A clip is `data:video/jpeg;base64,FRAME,FRAME,...`, which is how vLLM takes frames; the frames' own bytes
    say that they are PNG.
    """
    images, clips = iter(request.images), iter(request.clips)
    parts: list[dict[str, Any]] = []
    for text in _MARKS.split(request.text):
        if text == IMAGE_MARK:
            parts.append({"type": "image_url", "image_url": {"url": _PNG + _png(next(images))}})
        elif text == CLIP_MARK:
            frames = ",".join(_png(frame) for frame in next(clips))
            parts.append({"type": "video_url", "video_url": {"url": _FRAMES + frames}})
        elif text:
            parts.append({"type": "text", "text": text})
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if request.reply:
        messages.append({"role": "assistant", "content": request.reply})
    return messages


def request_of(messages: Any, *, key: str) -> VlmRequest:
    """Read chat messages: one of the user, and perhaps the start of the assistant's.

    Raises:
        WireError: If they are something else, or hold media that are no data URIs of pictures.
    """
    if not isinstance(messages, list) or not 1 <= len(messages) <= 2 or messages[0].get("role") != "user":
        raise WireError("messages: wanted one of the user, and after it at most one of the assistant")
    content = messages[0].get("content")
    parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text, images, clips = "", [], []
    for part in parts or ():
        kind = part.get("type")
        if kind == "text":
            text += str(part["text"])
        elif kind == "image_url":
            text += IMAGE_MARK
            images.append(_pixels(_after(part["image_url"]["url"], "data:image/")))
        elif kind == "video_url":
            text += CLIP_MARK
            frames = _after(part["video_url"]["url"], "data:video/").split(",")
            clips.append(np.stack([_pixels(frame) for frame in frames]))
        else:
            raise WireError(f"content of type {kind!r}: known are text, image_url, video_url")
    reply = str(messages[1].get("content", "")) if len(messages) == 2 else ""
    return VlmRequest(key=key, text=text, images=images, clips=clips, reply=reply)


def first_choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The choice with index 0, with its `message`: a server may give choices twice or in another order.

    Raises:
        WireError: If there is none.
    """
    choices = body.get("choices")
    if not isinstance(choices, list):
        raise WireError("the answer has no choices")
    first = next((c for c in choices if isinstance(c, Mapping) and c.get("index", 0) == 0), None)
    if first is None or not isinstance(first.get("message"), Mapping):
        raise WireError("the answer has no message")
    return first


def first_token_logprobs(body: Mapping[str, Any]) -> dict[str, float]:
    """Log-probabilities of the tokens that a server names for the first place of its answer.

    Raises:
        WireError: If there are none, or one is no finite number.
    """
    place = _places(first_choice(body))[0]
    named = [*(place.get("top_logprobs") or ()), place]
    return {
        str(entry["token"]): _number(entry.get("logprob"))
        for entry in named
        if isinstance(entry, Mapping) and "token" in entry
    }


def said_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Log-probability of every token that a choice says.

    Raises:
        WireError: If there are none, or one is no finite number.
    """
    return tuple(_number(place.get("logprob")) for place in _places(choice))


def _places(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or not content or not all(isinstance(p, Mapping) for p in content):
        raise WireError("the answer has no log-probabilities")
    return content


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"a log-probability is {value!r}, wanted a finite number")
    return float(value)


def _png(picture: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _after(uri: str, start: str) -> str:
    head, comma, data = uri.partition(",")
    if not head.startswith(start) or not head.endswith(";base64") or not comma:
        raise WireError(f"media: wanted a URI that begins with {start}...;base64, found {head[:40]!r}")
    return data


def _pixels(data: str) -> np.ndarray:
    try:
        return decode_image(base64.b64decode(data, validate=True))
    except (binascii.Error, DecodeError) as error:
        raise WireError(f"media: no picture can be read from it: {error}") from error
