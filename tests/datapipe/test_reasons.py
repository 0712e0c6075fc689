from __future__ import annotations

from urllib.error import URLError

import pytest

from datapipe.errors import DecodeError, SampleError, StageError
from datapipe.reasons import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DecodeError("truncated", "half of it"), "truncated"),
        (StageError("gone", "died"), "died"),
        (SampleError("no picture"), "SampleError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UnicodeDecodeError"),
        (URLError("name not known"), "URLError"),
    ],
)
def test_only_our_own_reasons_are_codes(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
