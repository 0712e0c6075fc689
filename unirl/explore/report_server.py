"""The report of a run that goes on, served to this machine alone and renewed when the run has written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from unirl.errors import ConfigError
from unirl.explore.report import render_report
from unirl.explore.run import open_run

__all__ = ["ReportServer"]

REST = 4.0
"""How long open pages rest after one was drawn, in times of the drawing: a fifth of a processor is used."""
_WATCHED = ("run.json", "metrics.jsonl", "summary.json", "experience/newest-snapshot")


class ReportServer:
    """Serves `/`, the page, and `/version`, a text that changes when the page would. Use it in a `with`."""

    def __init__(self, run_dir: str | Path, *, others: Iterable[str | Path] = (), port: int = 0) -> None:
        """Bind to the loopback address; nothing is served until `serve` is called.

        Args:
            run_dir: The run that the page is about.
            others: Runs of the same recipe with other seeds.
            port: TCP port; 0 takes a free one.

        Raises:
            ConfigError: If a run directory is wrong or the port is taken.
        """
        self._run_dir = Path(run_dir)
        self._others = [Path(other) for other in others]
        for path in (self._run_dir, *self._others):
            open_run(path)
        self._lock = threading.Lock()
        self._shown = ("", "")
        self._rests_until = 0.0
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}); name another, or leave it out"
            ) from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self._server.server_port}/"

    def serve(self) -> None:
        """Answer requests until Ctrl-C, or until `stop` is called from another thread."""
        threading.Thread(target=self.page, daemon=True).start()  # it is there when the browser asks
        try:
            self._server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return

    def stop(self) -> None:
        """Make `serve` return."""
        self._server.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.server_close()
        self._lock.acquire()  # and never released: a thread in the middle of a page would abort the exit

    def polled(self) -> str:
        """What an open page is told: the version that it shows while the page rests, then that of the run.

        A run writes at each step. Drawing the page as often would take a processor from it, so open pages are
        renewed after a rest of `REST` times what drawing took. Who loads the page sees it as it is.
        """
        is_resting = time.monotonic() < self._rests_until
        return self._shown[0] if is_resting else self.version()

    def version(self) -> str:
        """A text that is another one after the run has written something that the page shows."""
        digest = xxhash.xxh3_64()
        for path in (self._run_dir, *self._others):
            for name in _WATCHED:
                found = path / name
                stat = found.stat() if found.exists() else None
                seen = (stat.st_mtime_ns, stat.st_size) if stat else (0, 0)
                digest.update(f"{found} {seen}\n".encode())
        return digest.hexdigest()

    def page(self) -> str:
        """The page as it is now; made anew only when the run has written."""
        with self._lock:
            version = self.version()
            if self._shown[0] != version:
                started = time.monotonic()
                others = [open_run(other) for other in self._others]
                html = render_report(open_run(self._run_dir), others=others, live_version=version)
                self._shown = (version, html)
                self._rests_until = time.monotonic() + REST * (time.monotonic() - started)
            return self._shown[1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        report = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # A page of another site may make a browser ask here under that site's name.
                if self.headers.get("Host", "").rpartition(":")[0] not in {"127.0.0.1", "localhost"}:
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif self.path == "/":
                    self._answer(report.page(), "text/html")
                elif self.path == "/version":
                    self._answer(report.polled(), "text/plain")
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)

            def _answer(self, text: str, kind: str) -> None:
                body = text.encode("utf-8")
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                try:
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:
                    return  # whoever asked has gone, as a page that is closed

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged: the page asks every few seconds."""

        return Handler
