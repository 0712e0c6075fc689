"""Folders of pictures, with a caption file beside each or a metadata table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from datapipe.errors import DecodeError, SourceError
from datapipe.sources.arrange import arrange
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.conversation import Medium
from datapipe.sources.fields import FieldMap, UnseenNames
from datapipe.sources.listing import FolderListing, list_folder
from datapipe.sources.media import OpenedMedium
from datapipe.sources.paths import folded_name, loader_below, printable
from datapipe.sources.record import MISSING, Fault, Item, Note, Record
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row
from datapipe.sources.row_record import row_items
from datapipe.sources.rows import check_table, observe_table, read_rows
from datapipe.sources.sidecar import merge_caption, read_caption, read_sidecars

__all__ = ["FolderSource"]


class FolderSource:
    """A folder, searched through all its levels.

    A `metadata.csv|tsv|jsonl|parquet` governs its own folder and those below: each row names a picture
    (column `file_name` by default) relative to the table. Pictures that no row names need a sidecar
    `.txt`, `.caption` or `.json` of the same name. The key is the path without its suffix, unless the row
    has a `key`. Names of all files are held in memory, contents are not.
    """

    def __init__(
        self,
        root: str | SourcePath,
        *,
        fields: FieldMap | None = None,
        key_prefix: str | None = None,
        classes: bool | None = None,
    ) -> None:
        """Args:
        root: The folder.
        fields: Names of key, image and caption in metadata tables and JSON files.
        key_prefix: Put before every key.
        classes: The folder that holds a file is its class, and becomes the column `label`; there are no
            captions. None: when files lie in two or more folders and there is no caption of any kind.
        """
        self.root: SourcePath = Path(root) if isinstance(root, str) else root
        self._classes = classes
        self._fields = fields or FieldMap()
        self._prefix = f"{key_prefix}/" if key_prefix else ""
        if not self.root.is_dir():
            raise SourceError(f"{self.root}: not a folder")
        self.base = printable(self.root.resolve().as_posix())
        self.name = self.base

    def count(self) -> int:
        return len(self._listing.media)

    def observe_columns(self, kinds: ColumnKinds) -> None:
        self._check_not_empty(self._listing)
        for table in self._listing.metadata:
            check_table(self.root / table, self._fields)
            observe_table(self.root / table, self._fields, kinds)
        unseen = self._fields.unseen()
        for paths in self._listing.sidecars.values():
            for path in paths:
                if path.lower().endswith(".json"):
                    self._observe_sidecar(path, kinds, unseen)
        if not self._listing.metadata:
            unseen.refuse(f"{self.root}: the JSON files beside the pictures", is_empty_fine=False)
        if self._has_classes:
            kinds.declare({"label": "string"}, self.name)

    def items(self) -> Iterator[Item]:
        listing = self._listing
        self._check_one_table_a_folder(listing)
        for relative in listing.metadata:
            check_table(self.root / relative, self._fields)
        yield from listing.notes
        yield from listing.faults
        if self._has_classes and self._classes is None:
            detail = "no captions: folder names became the column label (--format folder makes none)"
            yield Note(place="", reason="class_folders", detail=detail)
        used: set[str] = set()
        for relative in listing.metadata:
            for row in read_rows(self.root / relative):
                yield from self._from_row(row, relative, used)
        yield from self._from_files(listing, used)

    @cached_property
    def _listing(self) -> FolderListing:
        return list_folder(self.root)

    @cached_property
    def _has_classes(self) -> bool:
        if self._classes is not None:
            return self._classes
        listing = self._listing
        folders = {os.path.dirname(path) for path in listing.media}  # noqa: PTH120
        return not listing.sidecars and not listing.metadata and len(folders) > 1 and "" not in folders

    def _observe_sidecar(self, path: str, kinds: ColumnKinds, unseen: UnseenNames) -> None:
        try:
            _, values = read_sidecars(self.root, [path])
            unseen.look(values)
            columns = arrange(values, self._fields, beside=[_medium(path)]).columns
        except DecodeError:
            return  # reported when the sample is read
        kinds.observe(columns, path)

    def _check_not_empty(self, listing: FolderListing) -> None:
        if listing.media or listing.metadata or listing.sidecars or listing.faults:
            return
        others = [note.place for note in listing.notes]
        held = f"{len(others)} other files, such as {others[0]}" if others else "no file at all"
        raise SourceError(
            f"{self.root}: holds no picture and no metadata table, but {held}; name the folder of the "
            f"pictures, or the tars or tables themselves"
        )

    def _check_one_table_a_folder(self, listing: FolderListing) -> None:
        tables: dict[str, str] = {}
        for relative in listing.metadata:
            other = tables.setdefault(os.path.dirname(relative), relative)  # noqa: PTH120
            if other != relative:
                raise SourceError(
                    f"{self.root}: {other} and {relative} both describe the same folder; keep one of them"
                )

    def _from_row(self, row: Row | Fault | Note, table: str, used: set[str]) -> Iterator[Item]:
        folder = os.path.dirname(table)  # noqa: PTH120
        row = replace(row, place=printable(os.path.join(folder, row.place)))  # noqa: PTH118
        if not isinstance(row, Row):
            yield row
            return
        picked = self._fields.pick(row.values)
        if picked.image is MISSING and not {"video", "images", "videos"} & picked.others.keys():
            detail = f"the row names no picture (column file_name); found columns {sorted(row.values)}"
            yield Fault(key="", place=row.place, reason="row_without_image", detail=detail)
            return

        def key_of(found: object, media: list[OpenedMedium]) -> object:
            paths = [self._relative(medium.path) for medium in media if medium.path is not None]
            used.update(paths)
            if found is not MISSING:
                return self._prefix + found if isinstance(found, str) else found
            named = paths[0] if paths else str(picked.image)
            return self._prefix + os.path.splitext(named)[0]  # noqa: PTH122

        yield from row_items(row, self._fields, folder=self.root / folder, key_of=key_of, constants={})

    def _relative(self, path: SourcePath) -> str:
        return path.as_posix().removeprefix(self.root.as_posix()).lstrip("/")

    def _from_files(self, listing: FolderListing, used: set[str]) -> Iterator[Item]:
        folded = {folded_name(stem): stem for stem in listing.sidecars}
        taken: set[str] = set()
        for relative in listing.media:
            stem = os.path.splitext(relative)[0]  # noqa: PTH122
            owner = stem if stem in listing.sidecars else folded.get(folded_name(stem))
            if owner is not None:
                taken.add(owner)
            if relative in used:
                if owner is not None:
                    yield from _unread_sidecars(listing.sidecars[owner])
                continue
            if owner is None and self._is_governed(relative, listing):
                detail = "no row of the metadata table names this picture, and it has no caption file"
                place = printable(relative)
                yield Fault(key=place, place=place, reason="image_without_row", detail=detail)
                continue
            if owner is not None and owner != stem:
                detail = f"the caption file is named {owner!r}"
                yield Note(place=printable(relative), reason="case_mismatch", detail=detail)
            yield self._from_sidecars(relative, stem, listing.sidecars.get(owner or "", []))
        for stem, paths in listing.sidecars.items():
            if stem not in taken:
                yield from _orphan_sidecars(paths)

    def _from_sidecars(self, relative: str, stem: str, sidecars: list[str]) -> Record | Fault:
        place = printable(relative)
        of_class: dict[str, object] = {}
        if self._has_classes:
            label = os.path.basename(os.path.dirname(relative))  # noqa: PTH119, PTH120
            if not label:
                detail = "the file lies in no class folder"
                return Fault(key=printable(stem), place=place, reason="no_class", detail=detail)
            of_class["label"] = printable(label)
        is_caption = not any(path.lower().endswith(".json") for path in sidecars)
        record = Record(
            key=self._prefix + stem,
            place=place,
            load=loader_below(self.root, relative),
            # A caption alone is read where the picture is, and not at all when the row is known.
            read_caption=partial(read_caption, self.root, sidecars) if sidecars and is_caption else None,
            columns=of_class,
            optional=frozenset({"caption"} if self._has_classes else ()),
        )
        if is_caption:
            return record
        try:
            text, values = read_sidecars(self.root, sidecars)
            picked = arrange(values, self._fields, beside=[_medium(relative)])
            caption = merge_caption(text, picked.caption)
        except DecodeError as error:
            return Fault(key=printable(stem), place=place, reason=error.reason, detail=error.detail)
        return replace(
            record,
            key=record.key if picked.key is MISSING else picked.key,
            caption=caption,
            columns=of_class | picked.columns,
            optional=picked.optional | record.optional,
        )

    @staticmethod
    def _is_governed(relative: str, listing: FolderListing) -> bool:
        folders = (os.path.dirname(table) for table in listing.metadata)  # noqa: PTH120
        return any(not folder or relative.startswith(folder + "/") for folder in folders)


def _medium(relative: str) -> Medium:
    return Medium(kind="image", value=relative)


def _unread_sidecars(paths: list[str]) -> Iterator[Note]:
    for path in paths:
        detail = "a metadata table names the picture of this file; only the table was read"
        yield Note(place=printable(path), reason="ignored_file", detail=detail)


def _orphan_sidecars(paths: list[str]) -> Iterator[Item]:
    for path in paths:
        place = printable(path)
        if path.lower().endswith(".json"):
            yield Note(place=place, reason="ignored_file", detail="a JSON file without a picture of its name")
        else:
            detail = "a caption file without a picture of its name"
            yield Fault(key=place, place=place, reason="caption_without_image", detail=detail)
