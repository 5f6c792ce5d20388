"""The page's server: files of the page, what there is to explore, and readings of pictures."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from riglstm.lab.explore.networks import (
    HIDDEN,
    MOST_NOISE,
    PAGE,
    SIDE,
    SIDES,
    Network,
    Request,
    read,
)

POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
"""Makes a browser hold to it: nothing is loaded from elsewhere."""
MOST_BYTES = 2**16
"""Of a request."""


class Server(ThreadingHTTPServer):
    """Serves the explorer of these networks."""

    daemon_threads = True

    def __init__(self, host: str, port: int, networks: Sequence[Network]) -> None:
        super().__init__((host, port), partial(Handler, directory=str(PAGE)))
        self.networks = networks
        self.reading = threading.Lock()
        """One reading at a time: each has all the processor's cores."""

    def about(self) -> dict[str, Any]:
        """What there is to explore."""
        return {
            "networks": [
                {"name": one.name, "source": one.source, "accuracy": one.accuracy}
                for one in self.networks
            ],
            "side": SIDE,
            "sides": SIDES,
            "most_noise": MOST_NOISE,
            "hidden": list(HIDDEN),
        }

    def answer(self, asked: Request) -> list[dict[str, Any]]:
        """Read a picture by every network."""
        with self.reading:
            return [read(one, asked) for one in self.networks]


def request(body: bytes) -> Request | None:
    """What a request asks for; None where it is no such request."""
    try:
        said = json.loads(body)
        pixels = torch.tensor(said["pixels"], dtype=torch.uint8)
        asked = Request(**{**said, "pixels": pixels})
        fits = (
            pixels.shape == (SIDE, SIDE)
            and asked.side in range(SIDES[0], SIDES[1] + 1)
            and 0 <= asked.noise <= MOST_NOISE
            and asked.hide in HIDDEN
        )
    except (ValueError, TypeError, KeyError, RuntimeError):
        return None
    return asked if fits else None


class Handler(SimpleHTTPRequestHandler):
    """One connection; whatever goes wrong is answered with a line."""

    server: Server
    server_version = "riglstm"
    timeout = 30
    """Seconds after which a silent client is left."""

    def do_GET(self) -> None:
        """Files of the page, and what there is to explore."""
        if self.path == "/api/about":
            self._send(HTTPStatus.OK, self.server.about())
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Readings."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/api/read":
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no page {self.path[:60]}")
        # Pages of other servers cannot send this type without asking.
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected a request in JSON")
        # Python makes no number of thousands of digits.
        elif not re.fullmatch(r"\d{1,6}", length) or int(length) > MOST_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"expected a request of at most {MOST_BYTES} bytes, got {length[:20] or 'none'}",
            )
        elif (asked := request(self.rfile.read(int(length)))) is None:
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                f"expected JSON with pixels, {SIDE} rows of {SIDE} numbers from 0 to 255, a side "
                f"from {SIDES[0]} to {SIDES[1]}, noise from 0 to {MOST_NOISE}, and hide, one of "
                f"{', '.join(HIDDEN)}, got something else",
            )
        else:
            try:
                traces = self.server.answer(asked)
            except Exception as error:
                said = f"the picture could not be read: {error}"
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, said)
            else:
                self._send(HTTPStatus.OK, {"traces": traces})

    def _refuse(self, status: HTTPStatus, line: str) -> None:
        # What was not read of the body would be taken for the next request.
        self.close_connection = True
        self._send(status, {"error": line})

    def _send(self, status: HTTPStatus, content: Any) -> None:
        said = json.dumps(content).encode()
        # A page that asks anew does not wait for the answer before.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    def end_headers(self) -> None:
        """With what every answer says."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page tells its user what goes wrong."""
