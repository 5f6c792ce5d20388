"""The page's server: files of the page, what there is to explore, and readings of pictures."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from riglstm.lab.explore.networks import (
    HIDDEN,
    MOST_NOISE,
    SIDE,
    SIDES,
    STROKES,
    Network,
    Request,
    drawn,
    read,
)

PAGE = Path(__file__).parent / "page"
FILES: dict[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/digit.js": ("digit.js", "text/javascript"),
    "/trace.js": ("trace.js", "text/javascript"),
    "/view.js": ("view.js", "text/javascript"),
}
"""By path: a file of the page and its type."""
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
"""Makes a browser hold to it: nothing is loaded from elsewhere."""
MOST_BYTES = 2**16
"""Of a request."""
LARGEST_SEED = 2**31


class RefusedError(Exception):
    """A request that cannot be answered: a status, and a line for the user."""

    def __init__(self, status: HTTPStatus, line: str) -> None:
        super().__init__(line)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves the explorer of these networks."""

    daemon_threads = True

    def __init__(self, host: str, port: int, networks: Sequence[Network]) -> None:
        super().__init__((host, port), Handler)
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
            "examples": {name: drawn(strokes).tolist() for name, strokes in STROKES.items()},
            "side": SIDE,
            "sides": SIDES,
            "most_noise": MOST_NOISE,
            "hidden": list(HIDDEN),
        }

    def answer(self, body: bytes) -> dict[str, Any]:
        """Read the picture that a request holds, by every network."""
        asked = request(body)
        with self.reading:
            traces = [read(one, asked) for one in self.networks]
        return {"traces": traces}


def request(body: bytes) -> Request:
    """What a request asks for; raises RefusedError where it is none."""
    try:
        said = json.loads(body)
        pixels = torch.tensor(said["pixels"], dtype=torch.uint8)
        asked = Request(**{**said, "pixels": pixels})
        fits = (
            pixels.shape == (SIDE, SIDE)
            and asked.side in range(SIDES[0], SIDES[1] + 1)
            and 0 <= asked.noise <= MOST_NOISE
            and asked.seed in range(LARGEST_SEED)
            and asked.hide in HIDDEN
        )
    except (ValueError, TypeError, KeyError, RuntimeError):
        fits = False
    if not fits:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            f"expected JSON with pixels, {SIDE} rows of {SIDE} numbers from 0 to 255, a side from "
            f"{SIDES[0]} to {SIDES[1]}, noise from 0 to {MOST_NOISE}, a seed, and hide, one of "
            f"{', '.join(HIDDEN)}, got something else",
        )
    return asked


class Handler(BaseHTTPRequestHandler):
    """One connection; whatever goes wrong is answered with a line."""

    server: Server
    server_version = "riglstm"
    timeout = 30
    """Seconds after which a silent client is left."""

    def do_GET(self) -> None:
        """Files of the page, and what there is to explore."""
        path = self.path.partition("?")[0]
        if path in FILES:
            name, kind = FILES[path]
            self._send(HTTPStatus.OK, (PAGE / name).read_bytes(), f"{kind}; charset=utf-8")
        elif path == "/api/about":
            self._send_json(HTTPStatus.OK, self.server.about())
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": f"there is no page {path[:60]}"})

    def do_POST(self) -> None:
        """Readings."""
        try:
            self._send_json(HTTPStatus.OK, self.server.answer(self._body()))
        except RefusedError as error:
            # What was not read of the body would be taken for the next request.
            self.close_connection = True
            self._send_json(error.status, {"error": str(error)})
        except Exception as error:
            self.close_connection = True
            said = f"the picture could not be read: {error}"
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": said})

    def _body(self) -> bytes:
        if self.path != "/api/read":
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no page {self.path[:60]}")
        # Pages of other servers cannot send this type without asking.
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected a request in JSON")
        length = self.headers.get("Content-Length", "")
        # Python makes no number of thousands of digits.
        if not re.fullmatch(r"\d{1,6}", length) or int(length) > MOST_BYTES:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"expected a request of at most {MOST_BYTES} bytes, got {length[:20] or 'none'}",
            )
        return self.rfile.read(int(length))

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        # A page that asks anew does not wait for the answer before.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in {
                **{"Content-Type": kind, "Content-Length": str(len(content))},
                **{"Cache-Control": "no-store", "Content-Security-Policy": POLICY},
                "X-Content-Type-Options": "nosniff",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page tells its user what goes wrong."""
