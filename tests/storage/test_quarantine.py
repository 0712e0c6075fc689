"""Records of what was refused, and of what was settled since."""

from __future__ import annotations

from pathlib import Path

from storage import FeatureStore


def test_resolved_records_are_hidden_and_kept(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "s")
    with store.writer(message="first") as writer:
        writer.quarantine(key="a", place="t.csv:2", reason="truncated: x", data=b"a")
        writer.quarantine(key="b", place="t.csv:3", reason="corrupt: y", data=b"b")
    with store.refresh().writer(message="repaired") as writer:
        writer.add("a")
        writer.resolve("t.csv:2")
    with store.refresh().writer(message="bad again") as writer:
        writer.quarantine(key="a2", place="t.csv:2", reason="corrupt: z", data=b"a2")
    store = store.refresh()
    assert store.quarantined().column("key").to_pylist() == ["b", "a2"]
    reasons = store.quarantined(with_resolved=True).column("reason").to_pylist()
    assert reasons == ["truncated: x", "corrupt: y", "resolved", "corrupt: z"]
    assert store.verify().ok
