"""The explorer's page in a real Chromium, as a user meets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from chromium import MISSING, PROGRAM, Chromium
from riglstm import RigLSTM, plot
from riglstm.lab.explore.networks import Network, Request, open_networks, read
from riglstm.lab.explore.server import Server
from test_plot import decoded

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

WEIGHTS = Path(__file__).parents[1] / "weights"
READY = "document.body.dataset.state === 'ready'"
STATUS = "document.getElementById('status').textContent"
STEP = "Number(document.getElementById('time').value)"


@pytest.fixture(scope="module")
def networks() -> list[Network]:
    return open_networks([WEIGHTS])


@pytest.fixture(scope="module")
def address(networks: list[Network]) -> Iterator[str]:
    with Server("127.0.0.1", 0, networks) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}/"
        served.shutdown()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path / "profile") as one:
        one.resize(1280, 900)
        yield one
        assert not one.problems


def array(browser: Chromium, tab: str, name: str) -> Any:
    """An array of the trace that the page shows."""
    where = f"explorer.shown.{tab}[0].trace{name}"
    return np.array(browser.run(f"Array.from({where}.data)")).reshape(browser.run(f"{where}.shape"))


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
    browser.run(
        "const size = document.getElementById('side'); size.value = 24;"
        "size.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.wait(f"{READY} && explorer.shown.digit[0].trace.T === 576")

    # What the page shows is what Python makes of the picture that was drawn.
    pixels = torch.tensor(browser.run("explorer.pad.rows()"), dtype=torch.uint8)
    assert 30 < int((pixels > 0).sum()) < 120
    traces = [read(network, Request(pixels, 24)) for network in networks]
    (layer,) = traces[0]["layers"]
    parts = {f".layers[0].{name}": layer[name] for name in plot.PARTS}
    for name, said in {
        **parts,
        **{f".{x}": traces[0][x] for x in ("input", "probabilities")},
    }.items():
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
    browser.run("document.getElementById('time').value = 289")
    browser.run("document.getElementById('time').dispatchEvent(new Event('input'))")
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


def test_a_digit_is_picked_without_drawing(browser, address):
    browser.open(address)
    browser.wait(f"document.body && {READY}")
    pick = "[...document.querySelectorAll('#examples button')]"
    names = browser.run(f"{pick}.map(button => button.getAttribute('aria-label'))")
    assert names == [f"Digit {digit}" for digit in range(10)]
    browser.run(f"{pick}[4].click()")
    browser.wait(f"{READY} && {STATUS}.includes('RigLSTM reads 4')")
    four = browser.run("fetch('api/about').then(got => got.json()).then(said => said.examples[4])")
    assert browser.run("explorer.pad.rows()") == four


def test_a_trace_of_ones_own_is_opened_in_the_second_tab(browser, address, tmp_path):
    torch.manual_seed(0)
    rnn, x = RigLSTM(3, 12, num_layers=2, num_cells=3), torch.randn(40, 2, 3)
    traces = rnn.trace(x)
    plot.save_trace(tmp_path / "mine.json", traces, x)
    (tmp_path / "other.json").write_text("[1]")
    browser.open(f"{address}#tab=trace")
    browser.wait("!!document.querySelector('#panel-trace:not([hidden])')")

    def choose(name: str) -> None:
        document = browser.call("DOM.getDocument")["root"]["nodeId"]
        field = browser.call("DOM.querySelector", nodeId=document, selector="#file")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / name)])

    choose("other.json")
    browser.wait("!document.getElementById('problem').hidden")
    said = browser.run("document.getElementById('problem').textContent")
    assert said == "Expected a file that riglstm.plot.save_trace wrote, got another."
    choose("mine.json")
    browser.wait("!document.getElementById('view').hidden")
    assert browser.run("document.getElementById('problem').hidden")
    for name in ("active", "keep", "peer_scores"):
        shown = array(browser, "trace", f".layers[1].{name}")
        np.testing.assert_array_equal(shown, getattr(traces[1], name).float().numpy())
    assert browser.run(STATUS).startswith("Step 40 of 40. Awake: cells ")
    browser.run(
        "const pick = document.getElementById('pick-layer'); pick.value = 1;"
        "pick.dispatchEvent(new Event('change'))"
    )
    cells = [j for j, on in enumerate(traces[1].active[39, 0].tolist()) if on]
    assert browser.run(STATUS) == f"Step 40 of 40. Awake: cells {', '.join(map(str, cells))}."
    browser.screenshot(tmp_path / "trace.png")
    browser.resize(390, 844)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.screenshot(tmp_path / "trace-390.png")
