"""WebDataset tars, read strictly: no sample is halved, merged or dropped without a word."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final, Literal, cast

from datapipe.errors import DecodeError, SourceError
from datapipe.sources.arrange import arrange
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.compression import DAMAGE, open_binary
from datapipe.sources.conversation import Medium
from datapipe.sources.fields import FieldMap
from datapipe.sources.paths import IMAGE_SUFFIXES, VIDEO_SUFFIXES, printable
from datapipe.sources.record import MISSING, Fault, Item, Note, Record
from datapipe.sources.remote import SourcePath
from datapipe.sources.sidecar import caption_text, json_values, merge_caption, one_caption
from datapipe.sources.tar_members import Group, Groups, Member
from datapipe.sources.tar_scan import TarScan, is_random_access, open_tar, scan_tar

__all__ = ["TAR_SUFFIXES", "SplitDot", "WebDatasetSource"]

TAR_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
SplitDot = Literal["first", "last"]

_VIDEO_FIELDS: Final = frozenset(suffix[1:] for suffix in VIDEO_SUFFIXES)
_MEDIA_FIELDS: Final = _VIDEO_FIELDS | {suffix[1:] for suffix in IMAGE_SUFFIXES}
_TEXT_FIELDS: Final = ("txt", "text", "caption")
_KNOWN_FIELDS: Final = _MEDIA_FIELDS | {*_TEXT_FIELDS, "json", "cls"}


class WebDatasetSource:
    """One tar in the WebDataset layout: `KEY.jpg`, `KEY.txt`, `KEY.json` side by side.

    The key ends at the first dot of the base name, as in WebDataset, or at the last dot on request. Keys
    are unique in one tar only, so that the tar's name is put before them unless another prefix is given.
    Two passes: headers first, so that a split or doubled sample is known before any of it is taken.
    """

    def __init__(
        self,
        path: str | SourcePath,
        *,
        fields: FieldMap | None = None,
        key_prefix: str | None = None,
        split_dot: SplitDot = "first",
    ) -> None:
        self.path: SourcePath = Path(path) if isinstance(path, str) else path
        self._fields = fields or FieldMap()
        self._split_dot = split_dot
        prefix = _stem(self.path) if key_prefix is None else key_prefix
        self._prefix = f"{prefix}/" if prefix else ""
        if not self.path.is_file():
            raise SourceError(f"{self.path}: no such file")
        self.name = printable(self.path.resolve().as_posix())
        self.base = self.name.rpartition("/")[0]

    def count(self) -> int:
        return len(self._groups)

    def observe_columns(self, kinds: ColumnKinds) -> None:
        metadata = (
            (name, member, self._media(group))
            for _, group in self._groups
            for name, member in group.members
            if name in ("json", "cls")
        )
        first = next(metadata, None)
        if first is None:
            return
        with open_tar(self.path) as tar:
            for name, member, media in chain([first], metadata):
                if name == "cls":
                    kinds.declare({"cls": "string"}, _place(self.path, member))
                    continue
                try:
                    values = json_values(_read(tar, member), member.name)
                    columns = arrange(values, self._fields, beside=media).columns
                except DecodeError:
                    continue  # reported when the sample is read
                kinds.observe(columns, _place(self.path, member))

    def items(self) -> Iterator[Item]:
        yield from self._scan.notes
        if self._scan.members:
            cut_key = self._split(self._scan.cut_name)[0] if self._scan.cut_name else None
            with open_tar(self.path) as tar:
                for key, group in self._groups:
                    if key != cut_key:
                        yield from self._from_group(key, group, tar)
        yield from self._scan.faults

    @cached_property
    def _scan(self) -> TarScan:
        return scan_tar(self.path)

    @cached_property
    def _groups(self) -> Groups:
        return Groups(self._scan.members, self._split)

    def _split(self, name: str) -> tuple[str, str]:
        folder, slash, base = name.rpartition("/")
        if self._split_dot == "first":
            stem, _, suffix = base.partition(".")
        else:
            stem, dot, suffix = base.rpartition(".")
            stem = stem if dot else base
            suffix = suffix if dot else ""
        return folder + slash + stem, suffix.lower()

    def _from_group(self, key: str, group: Group, tar: tarfile.TarFile) -> Iterator[Item]:
        place = _place(self.path, group.members[0][1])
        fault = self._layout_fault(group)
        if fault is not None:
            reason, detail = fault
            yield Fault(key=self._prefix + key, place=place, reason=reason, detail=detail)
            return
        media = self._media(group)
        if len(media) > 1:
            names = [name for name, _ in group.members if self._is_medium(name)]
            detail = f"fields {names} are all pictures or videos; choose one with a column map"
            yield Fault(key=self._prefix + key, place=place, reason="two_images", detail=detail)
            return
        for name, member in group.members:
            if name not in _KNOWN_FIELDS and name not in self._fields.mapping.values():
                detail = f"field {name!r} is not one of the known fields"
                yield Note(place=_place(self.path, member), reason="ignored_field", detail=detail)
        yield self._record(key, group, media, place, tar)

    def _layout_fault(self, group: Group) -> tuple[str, str] | None:
        listed = ", ".join(f"{member.name!r} @{member.offset}" for _, member in group.members[:6])
        names = [name for name, _ in group.members]
        if len(set(names)) < len(names):
            return "duplicate_member", f"one field stands twice: {listed}; keep one"
        if group.num_runs > 1:
            return (
                "split_sample",
                f"the members do not stand side by side: {listed}; write the tar in key order",
            )
        mapped = self._fields.mapping.values()
        dotted = [name for name in names if "." in name and name not in mapped]
        if dotted:
            detail = f"a dot in the name makes the unexpected fields {dotted} of {listed}; "
            return "dotted_name", detail + "rename the files, split at the last dot, or map the fields"
        return None

    def _media(self, group: Group) -> list[Medium]:
        return [
            Medium(kind="video" if name in _VIDEO_FIELDS else "image", value=member)
            for name, member in group.members
            if self._is_medium(name)
        ]

    def _is_medium(self, name: str) -> bool:
        wanted = [self._fields.mapping[kind] for kind in ("image", "video") if kind in self._fields.mapping]
        return name in wanted if wanted else name in _MEDIA_FIELDS

    def _record(
        self, key: str, group: Group, media: list[Medium], place: str, tar: tarfile.TarFile
    ) -> Record | Fault:
        try:
            texts, values = self._metadata(group, tar)
            picked = arrange(values, self._fields, beside=media)
            caption = merge_caption(one_caption(texts), picked.caption)
            load = self._loader(cast(Member, media[0].value), tar) if media else None
        except DecodeError as error:
            return Fault(key=self._prefix + key, place=place, reason=error.reason, detail=error.detail)
        found = key if picked.key is MISSING else picked.key
        named = f"{self._prefix}{found}" if isinstance(found, str | int) else found
        return Record(
            key=named,
            place=place,
            load=load,
            caption=caption,
            columns=picked.columns,
            optional=picked.optional,
        )

    def _loader(self, member: Member, tar: tarfile.TarFile) -> Callable[[], bytes]:
        """Read later, in any thread, from a plain file here; now from a stream, so that it goes forwards."""
        if not is_random_access(tar):
            data = _read(tar, member)
            return lambda: data

        def load() -> bytes:
            try:
                with open_binary(self.path) as file:
                    file.seek(member.offset_data)
                    return _whole(file.read(member.size), member)
            except OSError as error:
                raise DecodeError("unreadable_file", f"{member.name!r}: {error}") from error

        return load

    def _metadata(self, group: Group, tar: tarfile.TarFile) -> tuple[dict[str, str], dict[str, object]]:
        texts: dict[str, str] = {}
        values: dict[str, object] = {}
        wanted = self._fields.mapping.get("caption")
        for name, member in group.members:
            if name == wanted or (wanted is None and name in _TEXT_FIELDS):
                texts[member.name] = caption_text(_read(tar, member), member.name)
            elif name == "json":
                values.update(json_values(_read(tar, member), member.name))
            elif name == "cls":
                values.setdefault("cls", caption_text(_read(tar, member), member.name))
        return texts, values


def _read(tar: tarfile.TarFile, member: Member) -> bytes:
    if tar.fileobj is None:
        raise SourceError(f"{tar.name}: the archive was closed while it was read")
    try:
        tar.fileobj.seek(member.offset_data)
        return _whole(tar.fileobj.read(member.size), member)
    except DAMAGE as error:
        raise DecodeError("unreadable_file", f"{member.name!r}: {error}") from error


def _whole(data: bytes, member: Member) -> bytes:
    if len(data) < member.size:
        raise DecodeError("truncated", f"{member.name!r}: {len(data)} of {member.size} bytes could be read")
    return data


def _place(path: SourcePath, member: Member) -> str:
    return f"{path.name}!{member.name} @{member.offset}"


def _stem(path: SourcePath) -> str:
    name = path.name
    suffix = next((suffix for suffix in TAR_SUFFIXES[::-1] if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]
