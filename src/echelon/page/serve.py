# SPDX-License-Identifier: Apache-2.0
"""The page of a run that goes on, served to this machine alone: ``echelon observe RUN --serve``.

It listens on the loopback address. Who does not know the token in the link gets nothing, nor does a
page of another name that points here (the `Host` header is checked). Nothing can be written: GET
and HEAD are all there is. Each request reads the folder of the run anew; the page asks every few
seconds and draws again what changed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from echelon.core.errors import EchelonError
from echelon.page.documents.run import run_page
from echelon.page.html import document_json, page_html

_LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 24


@contextmanager
def served_run(run: Path) -> Iterator[str]:
    """Serve the page of a run while the context lasts, and give its link."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)

    class Handler(_RunHandler):
        folder = run
        secret = token

    server = ThreadingHTTPServer((_LOOPBACK, 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield f"http://{_LOOPBACK}:{server.server_port}/{token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RunHandler(BaseHTTPRequestHandler):
    """Answer for one run: its page, and the document that the page asks for again."""

    folder: Path
    secret: str

    def do_GET(self) -> None:
        """Answer with the page or its document."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer as to GET, without the body."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the terminal is for the run."""

    def _answer(self, *, with_body: bool) -> None:
        status, kind, text = self._found()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self) -> tuple[HTTPStatus, str, str]:
        """Return the status, the kind and the text of what was asked for."""
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{_LOOPBACK}:{port}", f"localhost:{port}"):
            return HTTPStatus.FORBIDDEN, "text/plain", "this name does not lead here\n"
        token, _, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.secret.encode()):
            return HTTPStatus.NOT_FOUND, "text/plain", "the link of `echelon observe` is needed\n"
        try:
            if name == "":
                return HTTPStatus.OK, "text/html", page_html(run_page(self.folder), live=True)
            if name == "document.json":
                document = document_json(run_page(self.folder))
                return HTTPStatus.OK, "application/json", document
        except EchelonError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n"
        return HTTPStatus.NOT_FOUND, "text/plain", "there is nothing of this name\n"
