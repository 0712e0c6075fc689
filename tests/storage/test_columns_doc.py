from __future__ import annotations

import re
import tempfile
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "columns.md"


def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(DOC), "exec"), names)
