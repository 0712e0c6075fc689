"""From one row of a table to the items that a source yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from datapipe.errors import DecodeError
from datapipe.sources.arrange import arrange, fold_parts
from datapipe.sources.fields import FieldMap
from datapipe.sources.media import OpenedMedium, open_medium
from datapipe.sources.record import Fault, Item, Record
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row

__all__ = ["row_items"]

_IMAGE: Final = frozenset({"image"})


def row_items(
    row: Row,
    fields: FieldMap,
    *,
    folder: SourcePath,
    key_of: Callable[[object, list[OpenedMedium]], object],
    constants: Mapping[str, str],
    is_prompt: bool = False,
) -> Iterator[Item]:
    """Yield the notes and the record of a row, or its fault.

    Args:
        row: The row.
        fields: Which column is what.
        folder: What paths in the row are relative to.
        key_of: Gives the key from what the row has, MISSING included, and its media.
        constants: Columns that every row gets, unless it has them.
        is_prompt: A row without media is complete.
    """
    try:
        arranged = arrange(row.values, fields)
        opened = [open_medium(medium.value, folder, row.place) for medium in arranged.media]
        media = [medium for medium in opened if medium is not None]
        if len(media) < len(opened) and len(opened) > 1:
            raise DecodeError("image_missing", f"{len(opened) - len(media)} of {len(opened)} media are null")
    except DecodeError as error:
        key = str(key_of(fields.pick(row.values).key, []))
        yield Fault(key=key, place=row.place, reason=error.reason, detail=error.detail)
        return
    for medium in media:
        yield from medium.notes
    main = Record(
        key=key_of(arranged.key, media),
        place=row.place,
        load=media[0].load if media else None,
        caption=arranged.caption,
        columns=dict(constants) | arranged.columns,
        optional=arranged.optional | (_IMAGE if is_prompt else frozenset()),
    )
    yield fold_parts(main, [medium.load for medium in media[1:]], is_pair=arranged.is_pair)
