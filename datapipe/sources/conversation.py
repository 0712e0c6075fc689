"""Conversations in the usual layouts, brought to one form.

The form is JSON text: a list of messages, each `{"role": ..., "content": [part, ...]}`. A part is
`{"type": "text", "text": ...}`, `{"type": "image", "index": n}` or `{"type": "video", "index": n}`, where n
counts the media of the sample from 0. Other keys of a message stay in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from datapipe.decode.text import check_text
from datapipe.errors import DecodeError
from datapipe.sources.record import MISSING

__all__ = ["Medium", "messages_text", "read_messages"]

_ROLES: Final = {
    **{"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant"},
    **{"gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant"},
    **{"tool": "tool", "observation": "tool", "function": "tool", "function_call": "assistant"},
}
_PLAIN_ROLES: Final = frozenset({"system", "user", "human", "assistant", "gpt", "tool"})
_PLACEHOLDER: Final = re.compile(r"(<image>|<video>)")
_MEDIA_KEYS: Final = {
    **{"image": "image", "image_url": "image", "input_image": "image"},
    **{"video": "video", "video_url": "video"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture or video that a row holds or names, as found: bytes, a path, base64, or {bytes, path}."""

    kind: str  # image, video
    value: object


@dataclass(slots=True)
class _Reading:
    """What one conversation has used so far of the media that stand beside it."""

    beside: Mapping[str, list[Medium]]  # kind -> media of the row's own columns, in order
    ordered: list[Medium] = field(default_factory=list)  # media in the order in which they are spoken of
    used: dict[str, int] = field(default_factory=lambda: {"image": 0, "video": 0})


def read_messages(
    found: object, media: list[Medium], *, system: object = MISSING
) -> tuple[list[dict[str, object]], list[Medium]]:
    """Bring one conversation to the form above.

    Args:
        found: A list of messages with `role` and `content`, or `from` and `value`; or JSON text of it.
        media: The media in columns beside it. Placeholders take them in order.
        system: Text that is put before the conversation when it does not begin with a system message.

    Returns:
        The messages, and all media in the order of their indices.

    Raises:
        DecodeError: Reasons `bad_messages`, `messages_empty`, `unknown_role`, `image_count` and
            `video_count` (placeholders and media differ in number), and those of check_text.
    """
    entries = _entries(found)
    beside = {kind: [medium for medium in media if medium.kind == kind] for kind in ("image", "video")}
    reading = _Reading(beside=beside)
    messages = [_message(entry, at, reading) for at, entry in enumerate(entries)]
    if system is not MISSING and system is not None and system != "" and messages[0]["role"] != "system":
        text = check_text(system, field="system")
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": text}]})
    for kind, wanted in beside.items():
        if reading.used[kind] != len(wanted):
            raise DecodeError(
                f"{kind}_count", f"{reading.used[kind]} {kind} placeholders, but {len(wanted)} {kind}s"
            )
    return messages, reading.ordered


def messages_text(messages: list[dict[str, object]]) -> str:
    """The JSON text of messages, as it stands in a column."""
    return json.dumps(messages, ensure_ascii=False)


def _entries(found: object) -> list[Mapping[str, object]]:
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise DecodeError("bad_messages", f"the messages are text that is no JSON: {error}") from error
    if not isinstance(found, list):
        raise DecodeError("bad_messages", f"the messages are a {type(found).__name__}, wanted a list")
    if not found:
        raise DecodeError("messages_empty", "the conversation has no message")
    for entry in found:
        if not isinstance(entry, Mapping):
            raise DecodeError("bad_messages", f"a message is {entry!r:.60}, wanted an object")
    return found


def _message(entry: Mapping[str, object], at: int, reading: _Reading) -> dict[str, object]:
    role_key, content_key = ("role", "content") if "role" in entry else ("from", "value")
    named = entry.get(role_key)
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise DecodeError(
            "unknown_role", f"message {at}: role {named!r:.40}, wanted one of {', '.join(_ROLES)}"
        )
    content = entry.get(content_key, MISSING)
    if content is MISSING or (content is None and not entry.get("tool_calls")):
        raise DecodeError("bad_messages", f"message {at}: no {content_key}; found {sorted(entry)}")
    kept = {key: value for key, value in entry.items() if key not in (role_key, content_key)}
    if named not in _PLAIN_ROLES:
        kept["from"] = named
    return {"role": role, "content": _parts(content, at, reading), **kept}


def _parts(content: object, at: int, reading: _Reading) -> list[dict[str, object]]:
    if content is None:
        return []
    if isinstance(content, str):
        return _text_parts(content, at, reading)
    if not isinstance(content, list):
        raise DecodeError("bad_messages", f"message {at}: the content is a {type(content).__name__}")
    return [part for entry in content for part in _part(entry, at, reading)]


def _text_parts(text: str, at: int, reading: _Reading) -> list[dict[str, object]]:
    check_text(text, field="message")
    parts: list[dict[str, object]] = []
    for piece in _PLACEHOLDER.split(text):
        if piece in ("<image>", "<video>"):
            parts.append(_placeholder(piece[1:-1], reading))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _part(entry: object, at: int, reading: _Reading) -> list[dict[str, object]]:
    if isinstance(entry, str):
        return _text_parts(entry, at, reading)
    if not isinstance(entry, Mapping):
        raise DecodeError("bad_messages", f"message {at}: a part is {entry!r:.60}, wanted an object")
    name = str(entry.get("type"))
    if name in ("text", "input_text", "output_text"):
        # Explicit parts say where media stand, so that <image> in their text is text.
        return [{"type": "text", "text": check_text(entry.get("text"), field="message")}]
    kind = _MEDIA_KEYS.get(name)
    if kind is None:
        raise DecodeError(
            "bad_messages", f"message {at}: part of type {name!r:.40}, wanted text, image or video"
        )
    value = next((entry[key] for key in (name, kind, f"{kind}_url", "url", "path") if entry.get(key)), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if value is None:
        return [_placeholder(kind, reading)]
    reading.ordered.append(Medium(kind=kind, value=value))
    return [{"type": kind, "index": len(reading.ordered) - 1}]


def _placeholder(kind: str, reading: _Reading) -> dict[str, object]:
    """Take the next medium of this kind that stands beside the messages; too many are counted later."""
    pool, at = reading.beside[kind], reading.used[kind]
    reading.used[kind] += 1
    if at < len(pool):
        reading.ordered.append(pool[at])
    return {"type": kind, "index": len(reading.ordered) - 1}
