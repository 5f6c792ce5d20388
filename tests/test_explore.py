"""The explorer's server: readings that are the layer's own, and what it refuses."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from riglstm.lab.cli.main import main
from riglstm.lab.explore import server
from riglstm.lab.explore.networks import (
    SIDE,
    STROKES,
    Network,
    Request,
    disturbed,
    drawn,
    open_networks,
)
from riglstm.lab.tasks.images import Size, positions
from test_plot import decoded

ROOT = Path(__file__).parents[1]
SEVEN = drawn(STROKES["7"])


@pytest.fixture(scope="module")
def networks() -> list[Network]:
    return open_networks([ROOT / "weights"])


@pytest.fixture(scope="module")
def port(networks: list[Network]) -> Iterator[int]:
    with server.Server("127.0.0.1", 0, networks) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served.server_address[1]
        served.shutdown()


def ask(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request(method, path, body, headers or {"Content-Type": "application/json"})
    answer = link.getresponse()
    return answer.status, dict(answer.headers), answer.read()


def asked(**changes: Any) -> bytes:
    return json.dumps({"pixels": SEVEN.tolist(), "side": 14, **changes}).encode()


def test_a_reading_is_the_trace_of_the_layer_and_the_answer_of_the_network(port, networks):
    status, _, body = ask(port, "POST", "/api/read", asked(side=15))
    assert status == 200
    rig, lstm = json.loads(body)["traces"]
    # The task's rule, once more: binarised, then pixel ⌊i·28/15⌋ of row ⌊r·28/15⌋.
    pixels = [int(SEVEN[r * 28 // 15, c * 28 // 15] >= 128) for r in range(15) for c in range(15)]
    np.testing.assert_array_equal(decoded(rig["input"])[:, 0, 0], pixels)
    assert rig["picture"] == [15, 15]
    net: Any = networks[0].net
    tokens = torch.tensor(pixels)[:, None, None]
    with torch.no_grad():
        (trace,) = net.core.layer.trace(net.tables(tokens).flatten(2))
        answers = [one.net(tokens).softmax(-1) for one in networks]
    (layer,) = rig["layers"]
    for name in ("active", "views", "peers"):
        np.testing.assert_array_equal(decoded(layer[name]), getattr(trace, name))
    for name in ("view_scores", "peer_scores", "keep"):
        np.testing.assert_allclose(decoded(layer[name]), getattr(trace, name), rtol=0, atol=1e-6)
    for one, answer in zip((rig, lstm), answers, strict=True):
        likely = decoded(one["probabilities"])
        assert likely.shape == (225, 1, 10)
        # By another backend, whose products are summed in another order.
        np.testing.assert_allclose(likely[-1], answer, rtol=0, atol=1e-5)
    assert lstm["layers"][0]["active"] is None


def test_noise_turns_pixels_over_and_what_is_hidden_is_black():
    plain = disturbed(Request(SEVEN, 14))
    assert torch.equal(plain, SEVEN)
    noisy = disturbed(Request(SEVEN, 14, noise=0.25))
    share = float((noisy != SEVEN).float().mean())
    assert 0.2 < share < 0.3
    assert torch.equal(noisy, disturbed(Request(SEVEN, 14, noise=0.25)))
    hidden = disturbed(Request(SEVEN, 14, noise=0.25, hide="the right"))
    assert not hidden[:, 14:].any()
    assert torch.equal(hidden[:, :14], noisy[:, :14])


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 5000,
        b"[]",
        asked(side=13),
        asked(side=10**9),
        asked(side=14.5),
        asked(pixels=[[0] * SIDE]),
        asked(pixels=[[256] * SIDE] * SIDE),
        asked(noise=float("nan")),
        asked(hide="all"),
        asked(hide=["x"]),
        asked(sides=3),
    ],
)
def test_a_wrong_request_is_refused_with_what_was_expected(body, port):
    status, _, answer = ask(port, "POST", "/api/read", body)
    assert status == 400
    assert json.loads(answer)["error"].startswith("expected JSON with pixels, 28 rows of 28")


def test_what_is_too_large_or_of_another_kind_is_refused(port):
    json_type = {"Content-Type": "application/json"}
    for path, headers, status, said in (
        ("/api/read", {**json_type, "Content-Length": "65537"}, 413, "at most 65536 bytes, got"),
        ("/api/read", {**json_type, "Content-Length": "9" * 5000}, 413, "bytes, got 99999999"),
        ("/api/read", {"Content-Type": "text/plain"}, 415, "expected a request in JSON"),
        ("/api/other", json_type, 404, "there is no page /api/other"),
    ):
        code, _, answer = ask(port, "POST", path, b"", headers)
        assert code == status
        assert said in json.loads(answer)["error"]
    assert ask(port, "GET", "/../server.py")[0] == 404


def test_what_goes_wrong_in_a_reading_is_said(port, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(server, "read", fails)
    status, _, answer = ask(port, "POST", "/api/read", asked())
    assert status == 500
    assert json.loads(answer)["error"] == "the picture could not be read: no memory"


def test_the_page_needs_nothing_from_elsewhere(port):
    for path in ("", *(file.name for file in server.PAGE.iterdir())):
        status, headers, body = ask(port, "GET", f"/{path}?x=1")
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert b"http://" not in body
        assert b"https://" not in body


def test_the_page_is_told_what_there_is(port):
    about = json.loads(ask(port, "GET", "/api/about")[2])
    assert [one["name"] for one in about["networks"]] == ["RigLSTM", "LSTM"]
    assert about["networks"][0]["source"].endswith("seed 11, trained on 14x14")
    assert about["networks"][0]["accuracy"]["16x16"] == pytest.approx(0.817, abs=1e-3)
    assert list(about["examples"]) == list("0123456789")
    assert about["examples"]["7"] == SEVEN.tolist()


def test_the_examples_are_read_as_what_they_are(networks):
    pictures = torch.stack([drawn(strokes) for strokes in STROKES.values()])
    for network, side in product(networks, (14, 15)):
        shown = network.config.prepare(pictures).flatten(1)[:, positions(SIDE, Size(side, side))]
        with torch.no_grad():
            assert network.net(shown.T.unsqueeze(2)).argmax(-1).tolist() == list(range(10))


def test_only_networks_that_read_digits_are_explored():
    weights = ROOT / "weights"
    (one,) = open_networks([weights / "mnist-riglstm.safetensors"])
    assert one.name == "RigLSTM"
    with pytest.raises(ValueError, match=r"expected a run on mnist .* got .*copying-riglstm"):
        open_networks([weights / "copying-riglstm.safetensors"])


def test_without_networks_there_is_the_second_tab_alone():
    with server.Server("127.0.0.1", 0, []) as served:
        assert served.about()["networks"] == []
        assert served.answer(Request(SEVEN, 14)) == []


def test_the_command_says_what_it_cannot_serve(capsys, tmp_path):
    assert main(["explore", "--weights", str(tmp_path / "none")]) == 2
    assert "which is not there; the repository of riglstm has a" in capsys.readouterr().err
    assert main(["explore", "--port", "65536"]) == 2
    assert "--port must be a whole number from 0 to 65,535, got 65536" in capsys.readouterr().err
    weights = str(ROOT / "weights" / "mnist-riglstm.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["explore", "--weights", weights, "--port", str(port)]) == 2
    assert f"must be free on this machine, got 127.0.0.1:{port}" in capsys.readouterr().err
