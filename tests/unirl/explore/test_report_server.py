from __future__ import annotations

import json
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from unirl.errors import ConfigError
from unirl.explore.report_server import ReportServer


def _get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=120, **options)


@pytest.fixture
def run(run_dir: Path, tmp_path: Path) -> Path:
    """A run without pictures, whose page is quickly made."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(run_dir / name, run)
    return run


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer(run) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server
        server.stop()
        thread.join()


def test_the_page_is_renewed_when_the_run_has_written(server: ReportServer, run: Path) -> None:
    first = _get(server.url)
    version = _get(f"{server.url}version").text
    assert f'"{version}"' in first.text
    assert "connect-src 'self'" in first.text
    assert _get(server.url).text == first.text
    line = {"kind": "train", "stage": "extra", "step": 99, "reward/mean": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert server.version() != version
    assert "extra" in _get(server.url).text


def test_open_pages_rest_after_one_was_drawn(server: ReportServer, run: Path) -> None:
    version = server.version()
    server.page()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "stage": "extra", "step": 99}) + "\n")
    assert _get(f"{server.url}version").text == version
    server._rests_until = 0.0
    assert _get(f"{server.url}version").text == server.version() != version


def test_a_browser_that_leaves_is_no_error(server: ReportServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.page()
    port = int(server.url.rstrip("/").rpartition(":")[2])
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
    assert _get(f"{server.url}version").status_code == 200
    assert capsys.readouterr().err == ""


def test_it_listens_to_this_machine_and_under_its_own_name_alone(server: ReportServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert _get(server.url, headers={"Host": "elsewhere.example:80"}).status_code == 403
    assert _get(f"{server.url}run.json").status_code == 404


def test_a_port_that_is_taken_is_said(server: ReportServer, run: Path) -> None:
    port = int(server.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
        ReportServer(run, port=port)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        ReportServer(tmp_path / "nowhere")
