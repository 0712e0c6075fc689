"""From the fields of one row to its sample: media, text columns, and the rows that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from datapipe.errors import DecodeError
from datapipe.sources.conversation import Medium, messages_text, read_messages
from datapipe.sources.fields import FieldMap, PickedRow
from datapipe.sources.preference import is_media_pair, read_text_pair
from datapipe.sources.record import MISSING, Record

__all__ = ["Arranged", "arrange", "fold_parts"]

_TEXT: Final = frozenset({"image", "caption"})
_MEDIA: Final = frozenset({"caption"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Arranged:
    """One row as a sample. The first medium is that of the row itself; each other gets a row of its own."""

    key: object
    media: tuple[Medium, ...]
    caption: object
    columns: dict[str, object]
    optional: frozenset[str] = frozenset()  # of image, caption: what this kind of sample may lack
    is_pair: bool = False  # two pictures, the preferred one first


def arrange(
    values: Mapping[str, object], fields: FieldMap, *, beside: Sequence[Medium] | None = None
) -> Arranged:
    """Tell conversations, preference pairs and plain samples apart, and bring each to its columns.

    Args:
        values: The row.
        fields: Which column is what.
        beside: The media of the sample when they are files of their own, as in tars; columns that name
            media are left aside then. None: they are in the row.

    Raises:
        DecodeError: See read_messages and read_text_pair.
    """
    picked = fields.pick(values)
    if "chosen" in picked.others and beside is None and _is_media_pair(picked):
        return _media_pair(picked)
    media = _media_of(picked) if beside is None else list(beside)
    if "messages" in picked.others:
        return _conversation(picked, media)
    if "chosen" in picked.others:
        return _text_pair(picked, media)
    columns = picked.columns
    if len(media) > 1:
        columns = _joined(columns, {"num_media": len(media)})
    return Arranged(key=picked.key, media=tuple(media), caption=picked.caption, columns=columns)


def fold_parts(main: Record, loads: list[Callable[[], bytes]], *, is_pair: bool) -> Record:
    """Give the second medium and those after it rows of their own, which stand or fall with the first.

    Args:
        main: The row of the sample, with the first medium.
        loads: The other media.
        is_pair: The two media are a preferred and a rejected picture of one prompt.
    """
    if not loads:
        return main
    parts = []
    for index, load in enumerate(loads, start=1):
        columns: dict[str, object] = {"media_of": main.key, "media_index": index}
        if is_pair:
            columns = dict(main.columns) | {"pair": main.key, "preferred": False}
        parts.append(
            Record(
                key=f"{main.key}#{index}",
                place=main.place,
                load=_different(main.load, load) if is_pair and main.load else load,
                caption=main.caption if is_pair else None,
                columns=columns,
                optional=main.optional if is_pair else _MEDIA,
            )
        )
    if is_pair:
        main = replace(main, columns=dict(main.columns) | {"pair": main.key, "preferred": True})
    return replace(main, parts=tuple(parts))


def _conversation(picked: PickedRow, beside: list[Medium]) -> Arranged:
    others = picked.others
    messages, media = read_messages(others["messages"], beside, system=others.get("system", MISSING))
    own: dict[str, object] = {"messages": messages_text(messages), "num_media": len(media)}
    return _texts_with_media(picked, media, own)


def _is_media_pair(picked: PickedRow) -> bool:
    return is_media_pair(picked.others.get("chosen"), picked.others.get("rejected"))


def _media_pair(picked: PickedRow) -> Arranged:
    chosen, rejected = picked.others["chosen"], picked.others["rejected"]
    if chosen == rejected:
        raise DecodeError("identical_pair", "chosen and rejected are the same picture")
    prompt = picked.others.get("prompt", MISSING)
    return Arranged(
        key=picked.key,
        media=(Medium(kind="image", value=chosen), Medium(kind="image", value=rejected)),
        caption=prompt if picked.caption is MISSING else picked.caption,
        columns=_joined(picked.columns, {}),
        is_pair=True,
    )


def _text_pair(picked: PickedRow, beside: list[Medium]) -> Arranged:
    prompt, chosen, rejected = (picked.others.get(name, MISSING) for name in ("prompt", "chosen", "rejected"))
    pair, media = read_text_pair(prompt, chosen, rejected, beside)
    own = pair | ({"num_media": len(media)} if len(media) > 1 else {})
    return _texts_with_media(picked, media, own)


def _texts_with_media(picked: PickedRow, media: Sequence[Medium], own: dict[str, object]) -> Arranged:
    return Arranged(
        key=picked.key,
        media=tuple(media),
        caption=picked.caption,
        columns=_joined(picked.columns, own),
        optional=_MEDIA if media else _TEXT,
    )


def _media_of(picked: PickedRow) -> list[Medium]:
    """Media of all columns that may hold them, in their order; a column may hold a list."""
    media: list[Medium] = []
    for kind, name in (("image", "image"), ("image", "images"), ("video", "video"), ("video", "videos")):
        value = picked.image if name == "image" else picked.others.get(name, MISSING)
        if value is MISSING or value is None:
            continue
        if name.endswith("s") and not isinstance(value, list):
            raise DecodeError("image_other_type", f"{name} is a {type(value).__name__}, wanted a list")
        values = value if isinstance(value, list) else [value]
        media.extend(Medium(kind=kind, value=one) for one in values if one is not None)
    return media


def _joined(columns: dict[str, object], own: dict[str, object]) -> dict[str, object]:
    """The user's columns and those that were made; a user column of such a name gets `user_` before it."""
    taken = own.keys() | {"pair", "preferred", "media_of", "media_index"}
    moved = {f"user_{name}" if name in taken else name: value for name, value in columns.items()}
    return moved | own


def _different(first: Callable[[], bytes], second: Callable[[], bytes]) -> Callable[[], bytes]:
    def load() -> bytes:
        data = second()
        if data == first():
            raise DecodeError("identical_pair", "chosen and rejected are the same picture, byte for byte")
        return data

    return load
