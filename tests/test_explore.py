"""The explorer: readings that are the layer's own, what is refused, and its page in Chromium."""

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
from matplotlib.image import imread

from chromium import MISSING, PROGRAM, Chromium
from riglstm import RigLSTM, plot
from riglstm.lab.cli.main import main
from riglstm.lab.explore import server
from riglstm.lab.explore.networks import (
    SIDE,
    Network,
    Request,
    disturbed,
    example,
    open_networks,
    read,
)
from riglstm.lab.tasks.images import Size, positions
from test_plot import decoded

ROOT = Path(__file__).parents[1]
SEVEN = example("7")


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


def test_the_examples_are_read_as_what_they_are(networks):
    pictures = torch.stack([example(str(digit)) for digit in range(10)])
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


def test_a_port_that_is_taken_is_named(capsys):
    weights = str(ROOT / "weights" / "mnist-riglstm.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["explore", "--weights", weights, "--port", str(port)]) == 2
    assert f"must be free on this machine, got 127.0.0.1:{port}" in capsys.readouterr().err


READY = "document.body.dataset.state === 'ready'"
STATUS = "document.getElementById('status').textContent"
STEP = "Number(document.getElementById('time').value)"


@pytest.fixture
def address(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with Chromium(tmp_path / "profile") as one:
        one.resize(1280, 900)
        yield one
        assert not one.problems


def array(browser: Chromium, tab: str, name: str) -> Any:
    """An array of the trace that the page shows."""
    where = f"explorer.shown.{tab}[0].trace{name}"
    return np.array(browser.run(f"Array.from({where}.data)")).reshape(browser.run(f"{where}.shape"))


def choose(browser: Chromium, name: str, value: int, event: str) -> None:
    """Give a control of the page a value, as its user does."""
    element = f"document.getElementById('{name}')"
    browser.run(f"{element}.value = {value}; {element}.dispatchEvent(new Event('{event}'))")


@pytest.mark.slow
def test_a_seven_is_drawn_and_read_at_another_size(browser, address, networks, tmp_path):
    browser.open(address)
    browser.wait(f"document.body && {READY}")
    assert "RigLSTM reads 7" in browser.run(STATUS)

    browser.run("document.getElementById('clear').click()")
    browser.wait(READY)
    left, top, side = browser.run(
        "(({left, top, width}) => [left, top, width])"
        "(document.getElementById('pad').getBoundingClientRect())"
    )
    corners = ((6.5, 6.5), (20, 6.5), (17, 13), (13, 23))
    browser.drag([(left + side * x / 28, top + side * y / 28) for x, y in corners])
    browser.wait(f"{READY} && explorer.shown.digit[0].trace.T === 196")
    choose(browser, "side", 24, "input")
    browser.wait(f"{READY} && explorer.shown.digit[0].trace.T === 576")

    # What the page shows is what Python makes of the picture that was drawn.
    pixels = torch.tensor(browser.run("explorer.pad.rows()"), dtype=torch.uint8)
    assert 30 < int((pixels > 0).sum()) < 120
    traces = [read(network, Request(pixels, 24)) for network in networks]
    (layer,) = traces[0]["layers"]
    parts = {f".layers[0].{name}": layer[name] for name in plot.PARTS}
    parts |= {f".{name}": traces[0][name] for name in ("input", "probabilities")}
    for name, said in parts.items():
        np.testing.assert_allclose(array(browser, "digit", name), decoded(said), rtol=0, atol=1e-5)

    # By keyboard: back from the end, on again, and play.
    browser.run("document.activeElement.blur()")
    assert browser.run(STEP) == 576
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("ArrowRight")
    assert browser.run(STEP) == 575
    awake = np.flatnonzero(decoded(layer["active"])[574, 0]).tolist()
    likely = [
        (one.name, decoded(said["probabilities"])[574, 0])
        for one, said in zip(networks, traces, strict=True)
    ]
    readings = " ".join(
        f"{name} reads {p.argmax()} ({round(100 * p.max())} %)." for name, p in likely
    )
    assert browser.run(STATUS) == (
        f"Step 575 of 576: line 24, pixel 23, black. {readings} "
        f"Awake: cells {', '.join(map(str, awake))}."
    )
    badges = browser.run("[...document.querySelectorAll('.cell h3 span')].map(e => e.textContent)")
    assert [j for j, badge in enumerate(badges) if badge == "awake"] == awake
    choose(browser, "time", 289, "input")
    browser.press(" ")
    browser.wait(f"{STEP} > 292")
    browser.press(" ")
    stopped = browser.run(STEP)
    assert browser.run("document.getElementById('play').textContent") == "Play"

    # The link shows the same again.
    link, status = browser.run("location.href"), browser.run(STATUS)
    assert f"step={stopped}" in link
    browser.open("about:blank")
    browser.open(link)
    browser.wait(f"document.body && {READY}")
    assert browser.run(STATUS) == status
    assert browser.run("explorer.pad.rows()") == pixels.tolist()

    # Nothing is wider than the window, in both themes, and the picture is drawn.
    for width in (1280, 390):
        browser.resize(width, 900)
        for theme in ("light", "dark"):
            browser.theme(theme)
            browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))")
            assert browser.run("document.documentElement.scrollWidth") <= width
            browser.screenshot(tmp_path / f"{width}-{theme}.png")
            image = imread(tmp_path / f"{width}-{theme}.png")[..., :3]
            assert image.shape[1] <= width
            assert (image.mean() > 0.6) == (theme == "light")
            assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100


@pytest.mark.slow
def test_a_digit_is_picked_without_drawing(browser, address):
    browser.open(address)
    browser.wait(f"document.body && {READY}")
    pick = "[...document.querySelectorAll('#examples button')]"
    names = browser.run(f"{pick}.map(button => button.getAttribute('aria-label'))")
    assert names == [f"Digit {digit}" for digit in range(10)]
    browser.run(f"{pick}[4].click()")
    browser.wait(f"{READY} && {STATUS}.includes('RigLSTM reads 4')")
    assert browser.run("explorer.pad.rows()") == example("4").tolist()


@pytest.mark.slow
def test_a_trace_of_ones_own_is_opened_in_the_second_tab(browser, address, tmp_path):
    torch.manual_seed(0)
    rnn, x = RigLSTM(3, 12, num_layers=2, num_cells=3), torch.randn(40, 2, 3)
    traces = rnn.trace(x)
    plot.save_trace(tmp_path / "mine.json", traces, x)
    (tmp_path / "other.json").write_text("[1]")
    browser.open(f"{address}#tab=trace")
    browser.wait("!!document.querySelector('#panel-trace:not([hidden])')")

    def open_file(name: str) -> None:
        document = browser.call("DOM.getDocument")["root"]["nodeId"]
        field = browser.call("DOM.querySelector", nodeId=document, selector="#file")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / name)])

    open_file("other.json")
    browser.wait("!document.getElementById('problem').hidden")
    said = browser.run("document.getElementById('problem').textContent")
    assert said == "Expected a file that riglstm.plot.save_trace wrote, got another."
    open_file("mine.json")
    browser.wait("!document.getElementById('view').hidden")
    assert browser.run("document.getElementById('problem').hidden")
    for name in ("active", "keep", "peer_scores"):
        shown = array(browser, "trace", f".layers[1].{name}")
        np.testing.assert_array_equal(shown, getattr(traces[1], name).float().numpy())
    assert browser.run(STATUS).startswith("Step 40 of 40. Awake: cells ")
    choose(browser, "pick-layer", 1, "change")
    cells = [j for j, on in enumerate(traces[1].active[39, 0].tolist()) if on]
    assert browser.run(STATUS) == f"Step 40 of 40. Awake: cells {', '.join(map(str, cells))}."
    browser.resize(390, 844)
    assert browser.run("document.documentElement.scrollWidth") <= 390
