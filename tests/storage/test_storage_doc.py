from __future__ import annotations

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "storage.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)
    assert len(examples) == 5
    names: dict[str, object] = {"__name__": "docs"}
    for example in examples:
        exec(compile(example, str(DOC), "exec"), names)
