"""Memory follows the number of workers and the size of pictures, not the number of samples."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = textwrap.dedent(
    """
    import resource, sys
    from datapipe import ingest
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = ingest(sys.argv[1], sys.argv[2], progress=False, duplicates="keep")
    print(report.num_added, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
)


def write_tar(path: Path, num: int) -> Path:
    """A tar of num pictures of 8x8, made by hand from one header each, because tarfile is slow."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 8, 7)).save(buffer, "JPEG")
    with path.open("wb") as file:
        for index in range(num):
            for suffix, data in (("jpg", buffer.getvalue()), ("txt", f"tiny {index}".encode())):
                member = tarfile.TarInfo(f"{index:07d}.{suffix}")
                member.size = len(data)
                file.write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    return path


def growth_mib(tar: Path, store: Path, num: int) -> int:
    command = [sys.executable, "-c", SCRIPT, str(tar), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    added, mib = map(int, done.stdout.split())
    assert added == num
    return mib


@pytest.mark.slow
def test_100_000_pictures_under_a_fixed_limit(tmp_path: Path) -> None:
    few = growth_mib(write_tar(tmp_path / "few.tar", 2_000), tmp_path / "few", 2_000)
    many = growth_mib(write_tar(tmp_path / "many.tar", 100_000), tmp_path / "many", 100_000)
    assert few < 300
    assert many < 500
