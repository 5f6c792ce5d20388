"""The page's server: files of the page, what there is to explore, and readings of pictures."""

from __future__ import annotations

import contextlib
import json
import math
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
    except (ValueError, RecursionError):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "expected a request in JSON") from None
    if not isinstance(said, dict):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "expected an object with pixels and side")
    if unknown := set(said) - set(Request._fields):
        raise _wrong(f"the fields {', '.join(Request._fields)}", ", ".join(sorted(unknown)))
    pixels, side = said.get("pixels"), said.get("side")
    if not _is_picture(pixels):
        raise _wrong(f"pixels as {SIDE} rows of {SIDE} whole numbers from 0 to 255", "others")
    if type(side) is not int or not SIDES[0] <= side <= SIDES[1]:
        raise _wrong(f"a side from {SIDES[0]} to {SIDES[1]}", side)
    noise, seed, hide = said.get("noise", 0.0), said.get("seed", 0), said.get("hide", "nothing")
    if type(noise) not in (int, float) or not 0 <= noise <= MOST_NOISE:
        raise _wrong(f"noise from 0 to {MOST_NOISE}", noise)
    if type(seed) is not int or not 0 <= seed < LARGEST_SEED:
        raise _wrong(f"a seed from 0 to {LARGEST_SEED - 1}", seed)
    if not isinstance(hide, str) or hide not in HIDDEN:
        raise _wrong(f"hide as one of {', '.join(HIDDEN)}", hide)
    return Request(torch.tensor(pixels, dtype=torch.uint8), side, float(noise), seed, hide)


def _is_picture(pixels: Any) -> bool:
    def fits(row: Any) -> bool:
        return isinstance(row, list) and len(row) == SIDE

    if not fits(pixels) or not all(map(fits, pixels)):
        return False
    return all(type(value) is int and 0 <= value <= 255 for row in pixels for value in row)


def _wrong(expected: str, got: Any) -> RefusedError:
    said = "no number" if isinstance(got, float) and math.isnan(got) else repr(got)[:60]
    return RefusedError(HTTPStatus.BAD_REQUEST, f"expected {expected}, got {said}")


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
        if not length.isdecimal():
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "expected the header Content-Length")
        # Python makes no number of thousands of digits.
        if len(length) > len(str(MOST_BYTES)) or int(length) > MOST_BYTES:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"expected a request of at most {MOST_BYTES} bytes, got {length[:20]}",
            )
        try:
            return self.rfile.read(int(length))
        except OSError as error:
            raise _wrong(f"a request of {length} bytes", error) from None

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        # A page that asks anew does not wait for the answer before.
        with contextlib.suppress(ConnectionError):
            self._write(status, content, kind)

    def _write(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page tells its user what goes wrong."""
