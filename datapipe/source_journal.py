"""Which sources are in the store to their end, so that a rerun need not read them again."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import xxhash

from datapipe.outcomes import SourceProgress
from datapipe.sources import Source
from datapipe.sources.remote import RemotePath
from storage import FeatureStore
from storage.snapshots import holds_store

__all__ = ["FinishedSource", "FinishedSources", "SourceJournal", "fingerprint"]

_FILE: Final = "sources.json"
_BLOCK_ROWS: Final = 8192
# What file systems tell about a file beside its size; one of them at least is needed.
_VERSION_FACTS: Final = (
    "ETag",
    "etag",
    "LastModified",
    "last_modified",
    "mtime",
    "md5Hash",
    "crc32c",
    "created",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSource:
    """A source of which every sample became a row, or is the same as one."""

    fingerprint: str  # of its files, and of the rules it was read by
    num_samples: int
    num_rows: int  # rows of the store that name it; fewer mean that some were deleted or taken back


class SourceJournal:
    """`STORE/reports/sources.json`: which sources are finished. Losing the file costs time, nothing else."""

    def __init__(self, store: FeatureStore, rules: str) -> None:
        """Args:
        store: The newest snapshot.
        rules: Everything that decides what becomes of a sample, as text.
        """
        self.rules = rules
        self._path = store.path / "reports" / _FILE
        self._finished = _read(self._path)
        self._num_rows = rows_by_source(store)

    def unfinished(self, sources: Sequence[Source]) -> tuple[list[Source], int]:
        """Sources that have to be read, and the number of samples in the others."""
        unread: list[Source] = []
        num_samples = 0
        for source in sources:
            record = self._finished.get(source.name)
            if record is None or not self._holds(record, source):
                unread.append(source)
            else:
                num_samples += record.num_samples
        return unread, num_samples

    def _holds(self, record: FinishedSource, source: Source) -> bool:
        """Whether neither the source nor the rules nor its rows have changed since."""
        num_rows = self._num_rows.get(source.name, 0)
        return record.num_rows == num_rows and record.fingerprint == fingerprint(source, self.rules)

    def add(self, store: FeatureStore, found: Mapping[str, tuple[str, int]]) -> None:
        """Record sources: name -> (fingerprint from before it was read, number of samples)."""
        if not found:
            return
        num_rows = rows_by_source(store)
        for name, (version, num_samples) in found.items():
            if num_samples and not num_rows.get(name):
                continue  # its samples have the names of other sources, whose rows are not watched for it
            self._finished[name] = FinishedSource(
                fingerprint=version, num_samples=num_samples, num_rows=num_rows.get(name, 0)
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: asdict(record) for name, record in sorted(self._finished.items())}
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(self._path)


class FinishedSources:
    """Notes in a journal which sources are finished, commit by commit."""

    def __init__(
        self,
        journal: SourceJournal,
        store: FeatureStore,
        sources: Sequence[Source],
        progress: Sequence[SourceProgress],
    ) -> None:
        """Args:
        journal: Written to.
        store: What the commits go to.
        sources: In the order in which they are read.
        progress: Of each of them; it grows.
        """
        self._journal, self._store, self._sources, self._progress = journal, store, sources, progress
        # From before anything is read, so that a change meanwhile is seen by the next run.
        self._fingerprints = [fingerprint(source, journal.rules) for source in sources]
        self._num_told = 0

    def __call__(self, num_finished: int) -> None:
        """Take note that the first num_finished sources are in the store to their end."""
        found = {}
        for index in range(self._num_told, num_finished):
            version, progress = self._fingerprints[index], self._progress[index]
            if version is not None and progress.num_bad == 0:
                found[self._sources[index].name] = (version, progress.num_samples)
        self._num_told = max(self._num_told, num_finished)
        self._journal.add(self._store.refresh(), found)


def rows_by_source(store: FeatureStore) -> dict[str, int]:
    """Number of rows of each source."""
    if "source" not in store.columns:
        return {}
    # By Arrow and not by SQL, which takes a tenth of a second to start in a process.
    view, num_rows = store.select(), Counter[str]()
    for start in range(0, len(view), _BLOCK_ROWS):
        column = view[start : start + _BLOCK_ROWS].to_arrow(["source"]).column("source")
        for pair in pc.value_counts(column).to_pylist():
            if pair["values"] is not None:
                num_rows[pair["values"]] += pair["counts"]
    return dict(num_rows)


def fingerprint(source: Source, rules: str) -> str | None:
    """Identity of a source's files by size and time, and of the rules; None where that cannot be told.

    A table stands for itself alone: pictures that it names are not looked at.
    """
    digest = xxhash.xxh3_128(rules.encode())
    try:
        for line in _facts(source):
            digest.update(line.encode("utf-8", "surrogateescape") + b"\0")
    except OSError:
        return None
    return str(digest.hexdigest())


def _facts(source: Source) -> Iterator[str]:
    root, path = getattr(source, "root", None), getattr(source, "path", None)
    if isinstance(root, Path):
        yield from _folder_facts(root)
    elif isinstance(path, Path):
        status = path.stat()
        yield f"{status.st_size} {status.st_mtime_ns}"
    elif isinstance(root, RemotePath):
        for name, info in sorted(root.fs.find(root.path, detail=True).items()):
            yield f"{name} {_remote_facts(info)}"
    elif isinstance(path, RemotePath):
        yield _remote_facts(path.fs.info(path.path))
    else:
        raise OSError(f"{source.name}: nothing tells whether it has changed")


def _remote_facts(info: Mapping[str, object]) -> str:
    known = [f"{name}={info[name]}" for name in _VERSION_FACTS if info.get(name) is not None]
    if not known:
        raise OSError(f"{info.get('name')}: the file system tells no version and no time")
    return f"{info.get('size')} {' '.join(known)}"


def _folder_facts(folder: Path) -> Iterator[str]:
    """One line for each file, without links to folders and hidden files, and without stores in it."""
    if holds_store(folder):
        return
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _folder_facts(Path(entry.path))
            continue
        try:
            status = entry.stat()
        except OSError:
            yield f"{entry.path} dead"
        else:
            yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"


def _read(path: Path) -> dict[str, FinishedSource]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: FinishedSource(**record) for name, record in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # sources are read again then
