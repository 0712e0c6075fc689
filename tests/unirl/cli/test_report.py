"""`unirl report --serve` as a person uses it: a page on loopback that renews itself, until a signal."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import unirl.explore  # noqa: F401  (so that the server is there at once)
from unirl.cli import main
from unirl.explore import report_server

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_run = runpy.run_path(str(ROOT / "tests" / "run_directory.py"))["make_run"]
    run: Path = make_run(tmp_path_factory.mktemp("runs") / "demo", steps=1, prompts=1, samples=1)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run that has just begun."""
    shutil.copy(finished / "run.json", tmp_path)
    return tmp_path


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """A shell starts what it runs in the background deaf to SIGINT; this test is not to hang there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_page_renews_itself_and_a_signal_ends_it(
    run: Path,
    finished: Path,
    port: int,
    number: signal.Signals,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_server, "REST", 0.0)
    pages: list[str] = []
    versions: list[str] = []

    def look() -> None:
        """What a browser does; the main thread serves, since only it hears signals."""
        try:
            transport = httpx.HTTPTransport(retries=8)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60) as client:
                for name in ("run.json", "metrics.jsonl"):
                    shutil.copy(finished / name, run)
                    versions.append(client.get("/version").text)
                    pages.append(client.get("/").text)
        finally:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(signal.SIGTERM)
    browser = threading.Thread(target=look)
    browser.start()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--serve", "--port", str(port), "--json"])
    browser.join()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out) == {"url": f"http://127.0.0.1:{port}/"}
    assert versions[0] != versions[1]
    assert "not there yet" in pages[0] and "reward/mean" not in pages[0]
    assert "reward/mean" in pages[1]
    assert signal.getsignal(signal.SIGTERM) == handler
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_the_page_is_named_for_a_program(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(run), "--json"])
    assert json.loads(capsys.readouterr().out) == {"report": str(run / "report.html")}
    assert (run / "report.html").is_file()
