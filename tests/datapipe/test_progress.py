"""The bar shows itself on a terminal only."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from datapipe.progress import progress_bar
from datapipe.sources import FolderSource
from datapipe.tally import Tally


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_wanted"), [(io.StringIO(), True), (Terminal(), False)])
def test_silent(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, is_wanted: bool) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with progress_bar([], is_wanted=is_wanted) as update:
        update(Tally(), 0)
    assert stream.getvalue() == ""


def test_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"{index}.jpg").write_bytes(b"")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar([FolderSource(tmp_path)] * 3, is_wanted=True) as update:
        update(Tally(num_added=4), 0)
    assert "4/24 samples" in stream.getvalue() and "0 bad" in stream.getvalue()
