"""Preference pairs, brought to a prompt, a chosen and a rejected answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from datapipe.decode.text import check_text
from datapipe.errors import DecodeError
from datapipe.sources.conversation import Medium, messages_text, read_messages
from datapipe.sources.paths import IMAGE_SUFFIXES
from datapipe.sources.record import MISSING

__all__ = ["is_media_pair", "read_text_pair"]

_ANSWER_MARK: Final = "\n\nAssistant:"


def is_media_pair(chosen: object, rejected: object) -> bool:
    """Whether both are pictures: bytes, {bytes, path}, a data: URI, or the name of a picture."""
    return _is_medium(chosen) and _is_medium(rejected)


def read_text_pair(
    prompt: object, chosen: object, rejected: object, media: list[Medium]
) -> tuple[dict[str, object], list[Medium]]:
    """The columns prompt, chosen and rejected: texts, or JSON text of messages.

    Without a prompt, that which both answers begin with is taken: equal first messages, or in texts all up
    to the last common "Assistant:".

    Returns:
        The columns, and the media in the order of the indices in the prompt.

    Raises:
        DecodeError: Reasons `identical_pair`, `mixed_pair`, `prompt_missing`, those of check_text and of
            read_messages.
    """
    chosen, rejected = _from_json(chosen), _from_json(rejected)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise DecodeError("mixed_pair", "one of chosen and rejected is a text, the other a list of messages")
    if isinstance(chosen, list):
        columns, ordered = _message_pair(_from_json(prompt), chosen, rejected, media)
    else:
        columns, ordered = _text_pair(_from_json(prompt), chosen, rejected, media)
    if columns["chosen"] == columns["rejected"]:
        raise DecodeError("identical_pair", f"chosen and rejected are both {columns['chosen']!r:.60}")
    return columns, ordered


def _text_pair(
    prompt: object, chosen: object, rejected: object, media: list[Medium]
) -> tuple[dict[str, object], list[Medium]]:
    best, worst = check_text(chosen, field="chosen"), check_text(rejected, field="rejected")
    if isinstance(prompt, list):
        messages, ordered = read_messages(prompt, media)
        return {"prompt": messages_text(messages), "chosen": best, "rejected": worst}, ordered
    if prompt is MISSING:
        shared = _shared_turns(best, worst)
        if not shared:
            raise DecodeError("prompt_missing", "the pair has no prompt, and its answers begin differently")
        prompt, best, worst = shared, best[len(shared) :], worst[len(shared) :]
    return {"prompt": check_text(prompt, field="prompt"), "chosen": best, "rejected": worst}, media


def _message_pair(
    prompt: object, chosen: list[object], rejected: object, media: list[Medium]
) -> tuple[dict[str, object], list[Medium]]:
    others = rejected if isinstance(rejected, list) else []
    if prompt is MISSING:
        shared = 0
        while shared < min(len(chosen), len(others)) and chosen[shared] == others[shared]:
            shared += 1
        if shared == len(chosen) == len(others):
            raise DecodeError("identical_pair", f"chosen and rejected are the same {shared} messages")
        prompt, chosen, others = chosen[:shared], chosen[shared:], others[shared:]
        if not prompt:
            raise DecodeError("prompt_missing", "the pair has no prompt, and its answers begin differently")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    asked, ordered = read_messages(prompt, media)
    columns: dict[str, object] = {"prompt": messages_text(asked)}
    for name, answer in (("chosen", chosen), ("rejected", others)):
        messages, own = read_messages(answer, [])
        if own:
            raise DecodeError("bad_messages", f"{name} holds pictures; only those of the prompt can be kept")
        columns[name] = messages_text(messages)
    return columns, ordered


def _shared_turns(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    end = first.rfind(_ANSWER_MARK, 0, length)
    return "" if end < 0 else first[: end + len(_ANSWER_MARK)]


def _from_json(value: object) -> object:
    """Lists of messages that stand as JSON text, as in CSV, are read."""
    if not (isinstance(value, str) and value.lstrip().startswith("[{")):
        return value
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found


def _is_medium(value: object) -> bool:
    if isinstance(value, str):
        is_name = "\n" not in value and PurePosixPath(value).suffix.lower() in IMAGE_SUFFIXES
        return is_name or value.startswith("data:image/")
    return isinstance(value, bytes | bytearray | memoryview) or (
        isinstance(value, Mapping) and bool({"bytes", "path"} & value.keys())
    )
