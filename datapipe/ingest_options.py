"""What an ingest was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Final, Literal, get_args

from datapipe.errors import DataError, SourceError
from datapipe.judge import INDEX_KINDS, Judge
from datapipe.media_rules import (
    FramePolicy,
    MediaRules,
    parse_background,
    parse_encoding,
    parse_resizing,
    parse_tensor,
)
from datapipe.settling import DuplicatePolicy
from datapipe.sources import Source
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.fields import nearest
from datapipe.sources.webdataset import SplitDot

__all__ = ["Engine", "RowOptions", "check_run"]

Engine = Literal["local", "ray"]

_OPTIONAL: Final = frozenset({"image", "caption"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Everything that decides which rows the samples become; `ingest` says what each option means."""

    format: str | None
    column_map: Mapping[str, str]
    optional: tuple[str, ...]
    required: tuple[str, ...]
    key_prefix: str | None
    split_dot: SplitDot
    max_pixels: int
    background: str | tuple[int, ...]
    frames: FramePolicy
    duplicates: DuplicatePolicy
    trust: bool
    resize: str | None
    reencode: str | None
    tensors: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = set(self.optional) - _OPTIONAL
        if unknown:
            raise DataError(f"optional holds {sorted(unknown)}; wanted image, caption or both")
        _check_positive("max_pixels", self.max_pixels)
        _check_choice("duplicates", self.duplicates, get_args(DuplicatePolicy))
        self.media_rules()  # refuses what it cannot read before any source is opened

    def as_asked(self) -> dict[str, object]:
        """The options as keywords of `ingest`, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def media_rules(self) -> MediaRules:
        """The rules for pictures and videos.

        Raises:
            DataError: When an option cannot be read, or two do not go together.
        """
        return MediaRules(
            max_pixels=self.max_pixels,
            background=parse_background(self.background),
            frames=self.frames,
            trust=self.trust,
            resize=None if self.resize is None else parse_resizing(self.resize),
            encoding=None if self.reencode is None else parse_encoding(self.reencode),
            tensors=tuple(parse_tensor(text) for text in self.tensors),
        )

    def judge(self, media: MediaRules, sources: Sequence[Source], columns: Mapping[str, str]) -> Judge:
        """The judge of samples from these sources.

        Args:
            media: The rules for pictures and videos.
            sources: Asked for the types of their columns.
            columns: Name -> type of the columns that the store has.

        Raises:
            SourceError: When a required column is in no source and not in the store.
        """
        kinds = ColumnKinds()
        for source in sources:
            source.observe_columns(kinds)
        kinds.fit_store(columns)
        _check_required(self.required, kinds.names() | columns.keys() | INDEX_KINDS.keys())
        return Judge(
            kinds=kinds, optional=frozenset(self.optional), required=frozenset(self.required), media=media
        )


def check_run(
    *,
    max_bad_fraction: float,
    engine: str,
    workers: int,
    commit_rows: int,
    commit_s: float,
    dry_run: int | None,
) -> None:
    """Refuse what an ingest cannot run with.

    Raises:
        DataError: When an argument is out of its range.
    """
    if not 0 <= max_bad_fraction <= 1:
        raise DataError(f"max_bad_fraction is {max_bad_fraction}, wanted a share from 0 to 1")
    _check_choice("engine", engine, get_args(Engine))
    _check_positive("workers", workers)
    _check_positive("commit_rows", commit_rows)
    if not commit_s >= 0:
        raise DataError(f"commit_s is {commit_s}, wanted seconds, 0 or more")
    if dry_run is not None:
        _check_positive("dry_run", dry_run)


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise DataError(f"{name} is {value!r}, wanted a whole number, 1 or more")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise DataError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")


def _check_required(required: Sequence[str], known: Set[str]) -> None:
    for name in required:
        if name not in known:
            raise SourceError(
                f"required column {name!r} is in no source; there are {sorted(known)}{nearest(name, known)}"
            )
