"""Files behind a URL, with the part of pathlib that the sources use."""

from __future__ import annotations

import difflib
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Final, cast
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from datapipe.errors import SourceError
from datapipe.sources.forward import ForwardFile

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["RemotePath", "SourcePath", "is_url", "open_url", "shown_url"]

_URL: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_USER: Final = re.compile(r"://[^/@]*@")
_BUFFER_BYTES: Final = 2**18
_SECRET: Final = re.compile(
    r"sig|token|secret|key|credential|password|auth|expires|policy|^x-(amz|goog)-|^s[a-z]{1,2}$", re.I
)


def is_url(spec: str) -> bool:
    """Whether the text begins with a scheme, as in s3://, memory:// or file://."""
    return _URL.match(spec) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePath:
    """A file or folder of an fsspec file system. Text and messages never show user names or signatures."""

    fs: AbstractFileSystem = field(repr=False)
    path: str  # as the file system spells it
    scheme: str

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.path).path if self._is_http else self.path).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        head = self._bare().rstrip("/").rpartition("/")[0]
        return self._at(head or self.path)

    @property
    def _is_http(self) -> bool:
        return self.scheme in ("http", "https")

    def __truediv__(self, relative: str) -> RemotePath:
        return self._at(f"{self._bare().rstrip('/')}/{relative}")

    def __str__(self) -> str:
        return shown_url(str(self.fs.unstrip_protocol(self.path)))

    def as_posix(self) -> str:
        return str(self)

    def resolve(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        with _os_errors(self):
            return bool(self.fs.exists(self.path))

    def is_file(self) -> bool:
        with _os_errors(self):
            return bool(self.fs.isfile(self.path))

    def is_dir(self) -> bool:
        with _os_errors(self):
            return bool(self.fs.isdir(self.path))

    def size(self) -> int | None:
        """Bytes, or None when the server does not tell."""
        with _os_errors(self):
            size: int | None = self.fs.info(self.path).get("size")
        return size

    def open(self) -> IO[bytes]:
        """Open for reading and seeking. A server that cannot serve ranges is read from its start again."""
        with _os_errors(self):
            opened: IO[bytes] = self.fs.open(self.path, "rb")
        if opened.seekable() and not type(opened).__name__.endswith("StreamingFile"):
            return opened
        opened.close()
        return cast(IO[bytes], io.BufferedReader(ForwardFile(self._stream), _BUFFER_BYTES))

    def _stream(self) -> IO[bytes]:
        with _os_errors(self):
            stream: IO[bytes] = self.fs.open(self.path, "rb")
        return stream

    def read_bytes(self) -> bytes:
        with _os_errors(self):
            data: bytes = self.fs.cat_file(self.path)
        return data

    def read_text(self, encoding: str) -> str:
        return self.read_bytes().decode(encoding)

    def iterdir(self) -> Iterator[RemotePath]:
        with _os_errors(self):
            found = self.fs.ls(self.path, detail=False)
        for path in found:
            if path.rstrip("/") != self.path.rstrip("/"):
                yield self._at(path.rstrip("/"))

    def walk(self) -> list[str]:
        """All files below, relative, sorted."""
        with _os_errors(self):
            found = self.fs.find(self.path)
        base = self.path.rstrip("/") + "/"
        return sorted(path.removeprefix(base) for path in found if path.startswith(base))

    def glob(self) -> list[RemotePath]:
        """All files that the path matches, taken as a pattern."""
        with _os_errors(self):
            found = self.fs.glob(self.path)
        return [self._at(path) for path in sorted(found)]

    def _bare(self) -> str:
        return urlunsplit((*urlsplit(self.path)[:3], "", "")) if self._is_http else self.path

    def _at(self, path: str) -> RemotePath:
        return RemotePath(fs=self.fs, path=path, scheme=self.scheme)


SourcePath = Path | RemotePath


def shown_url(url: str) -> str:
    """A URL without user name, password, keys and signatures."""
    url = _USER.sub("://", url)
    if not url.startswith(("http://", "https://")):
        return url
    head, mark, query = url.partition("?")
    shown = [(name, value) for name, value in parse_qsl(query) if not _SECRET.search(name)]
    return head + mark + urlencode(shown) if shown else head


def open_url(url: str) -> SourcePath:
    """The file or folder that a URL names; one with file:// becomes a Path.

    Raises:
        SourceError: For a scheme that nothing here serves, or that needs a package which is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0].lower()
    if scheme in ("file", "local"):
        return Path(str(fsspec.core.strip_protocol(url)))
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise SourceError(f"{scheme}:// cannot be read here: {error}") from error
    except ValueError as error:
        near = difflib.get_close_matches(scheme, fsspec.available_protocols(), n=1)
        hint = f"; did you mean {near[0]}://?" if near else ""
        raise SourceError(f"{scheme}://: {error}{hint}") from error
    return RemotePath(fs=fs, path=path, scheme=scheme)


@contextmanager
def _os_errors(path: RemotePath) -> Iterator[None]:
    """Turn what HTTP clients raise beside OSError into one."""
    http = sys.modules.get("aiohttp")
    kinds: tuple[type[Exception], ...] = () if http is None else (http.ClientError,)
    try:
        yield
    except kinds as error:
        raise OSError(f"{path}: {error}") from error
    except TimeoutError as error:
        raise OSError(f"{path}: the server did not answer in time") from error
