"""The report of a run in a real browser, in which it loads nothing."""

import json
import os
import re
import shutil
import subprocess

import numpy
import pytest
from PIL import Image

from scripts.report import write_report

# CI must not pass without it; who has it not may still run the other tests.
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not shutil.which("chromium") and "CI" not in os.environ, reason="needs chromium: apt-get install chromium"
    ),
]


CHROMIUM = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]


def open_page(url, folder):
    """Return the DOM of a page once its scripts have run, and the addresses that the page asked for on a network."""
    log = folder / "network.json"
    command = [*CHROMIUM, "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1300,1700"]
    command += [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--log-net-log={log}", "--virtual-time-budget=20000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    content = json.loads(log.read_text())
    request = content["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [event.get("params", {}) for event in content["events"] if event["type"] == request]
    # The browser's own services have no origin.
    pages = [params["url"] for params in asked if params.get("initiator") != "not an origin" and "url" in params]
    return done.stdout, [url for url in pages if url.startswith("http")]


def test_report_shows_the_run_and_asks_the_network_for_nothing(started, tmp_path):
    out = started.copy(tmp_path / "a <b>run</b>")
    # The page forbids itself all loading; without that, it must not even try.
    page = re.sub(r"<meta http-equiv.*?>", "", write_report([out])[0].read_text(), count=1, flags=re.DOTALL)
    bare = tmp_path / "bare.html"
    bare.write_text(page)
    dom, asked = open_page(bare.as_uri(), tmp_path)
    assert asked == []
    assert "a &lt;b&gt;run&lt;/b&gt;</h1>" in dom
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"<td>{last['acc1']:.5g}" in dom
    assert f"<td>{last['loss']:.5g}" in dom


def test_a_page_that_asks_is_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<img src="http://elsewhere.invalid/x.png">')
    assert open_page(page.as_uri(), tmp_path)[1] == ["http://elsewhere.invalid/x.png"]


def test_forbidding_loads_lets_the_curves_be_drawn(started, tmp_path):
    page, _ = write_report([started.copy(tmp_path / "out")])
    command = [*CHROMIUM, "--window-size=1400,1700", f"--screenshot={tmp_path / 'page.png'}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=150, check=True, cwd=tmp_path)
    pixels = numpy.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    for color in [(31, 119, 180), (255, 127, 14)]:  # matplotlib's first two: training, validation
        assert (pixels == color).all(axis=2).sum() > 20
