"""An S3 endpoint over HTTP on loopback, which refuses, delays or cuts off requests on demand."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from raytrain_opt.storage import open_store

Fault = Callable[["Request"], "Answer | None"]
Answer = tuple[str, bytes]


class Request:
    """A request before it reaches the storage."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
        self.method, self.path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.size = int(environ.get("CONTENT_LENGTH") or 0)

    def cut(self) -> None:
        """Lose the connection: the client gets a reset instead of an answer."""
        connection: socket.socket = self.environ["werkzeug.socket"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        closed, other = socket.socketpair()
        other.close()
        with closed:
            os.dup2(closed.fileno(), connection.fileno())


def refuse(code: str, status: str = "503 Slow Down") -> Fault:
    """Answer with an error of S3."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return lambda _: (status, body)


def delay(seconds: float) -> Fault:
    """Answer late."""

    def wait(_: Request) -> None:
        time.sleep(seconds)

    return wait


def cut(request: Request) -> Answer:
    """Lose the connection before the storage sees the request."""
    request.cut()
    return "500 Cut", b""


class _QuietHandler(WSGIRequestHandler):
    """Keep the log of requests out of the tests' output."""

    def log(self, *_: Any) -> None:
        """Log nothing."""


class S3Server:
    """One bucket; `faults` are met by the next requests that `applies_to` chooses, in order."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._application = DomainDispatcherApplication(create_backend_app)
        self.faults: deque[Fault | None] = deque()
        self.applies_to: Callable[[Request], bool] = lambda _: True
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._server = ThreadedWSGIServer("127.0.0.1", 0, self._serve, handler=_QuietHandler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[S3Server]:
        """Serve for the time of the block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def new_uri(self) -> str:
        """Return the URI of an empty folder in a bucket of its own."""
        bucket = f"bucket-{uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        self.requests.clear()
        return f"s3://{bucket}/runs?endpoint={self.endpoint}"

    def reset(self) -> None:
        """Forget faults and requests."""
        self.faults.clear()
        self.requests.clear()
        self.applies_to = lambda _: True

    def pass_on(self, request: Request) -> None:
        """Let the storage do what the request asks for; the client gets another answer."""
        collected = self._application(request.environ, lambda *_: None)
        b"".join(collected)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        with self._lock:
            self.requests.append(request)
            fault = self.faults.popleft() if self.faults and self.applies_to(request) else None
        answer = fault(request) if fault else None
        if answer is not None:
            status, body = answer
            environ["wsgi.input"].read(request.size)
            start_response(status, [("Content-Length", str(len(body)))])
            return [body]
        reply: Iterable[bytes] = self._application(environ, start_response)
        return reply


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One endpoint for all tests of a process."""
    with S3Server().running() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An endpoint without faults, and credentials that it accepts."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETKEY")
    open_store.cache_clear()
    s3_server.reset()
    yield s3_server
    s3_server.reset()
