"""A web server on the loopback interface, with faults on demand."""

from __future__ import annotations

import functools
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class WebServer:
    """Serves a folder at `url`.

    requests: how often each path was asked for.
    failures: path -> statuses that the next requests for it get.
    lists: whether folders are listed.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.failures: dict[str, list[int]] = {}
        self.lists = True
        self.url = ""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments, state: WebServer, **options) -> None:
        self.state = state
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        self.state.requests[self.path] += 1
        failures = self.state.failures.get(self.path)
        if failures:
            self.send_error(failures.pop(0))
        else:
            super().do_GET()

    def list_directory(self, path):
        return super().list_directory(path) if self.state.lists else self.send_error(403)

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    state = WebServer()
    handler = functools.partial(_Handler, state=state, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
