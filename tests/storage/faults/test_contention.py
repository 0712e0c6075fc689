"""Processes and threads that commit, compact, delete and collect garbage against each other, and readers."""

from __future__ import annotations

import pytest

from tools.soak.contention import contend


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 100])
def test_two_processes_and_two_threads_against_each_other(tmp_path, seed):
    contend(tmp_path / "store", seed, 12)
