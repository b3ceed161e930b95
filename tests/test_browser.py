"""Pages in a real browser: the report of a run, which loads nothing, and TensorBoard on a run's folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request

import numpy
import pytest
from PIL import Image

from scripts.report import write_report
from tests.ranks import REPOSITORY

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


def read_json(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


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


@pytest.fixture(scope="module")
def tensorboard(started):
    """The address of a TensorBoard on a run's folder."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(started.out)]
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    limit = threading.Timer(120, process.kill)
    limit.start()
    try:
        found = next((m for line in process.stdout if (m := re.search(r"http://127\.0\.0\.1:\d+/", line))), None)
        assert found, "TensorBoard has ended"
        limit.cancel()
        yield found[0]
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_tensorboard_shows_the_run(tensorboard, started):
    records = [json.loads(line) for line in (started.out / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    tags = read_json(f"{tensorboard}data/plugin/scalars/tags")
    (name,) = tags
    assert {"train/loss", "train/acc1", "train/lr", "val/loss", "val/acc1", "val/acc5"} <= set(tags[name])
    scalars = read_json(f"{tensorboard}data/plugin/scalars/scalars?run={name}&tag=train%2Floss")
    assert {step: pytest.approx(value) for _, step, value in scalars} == losses


@pytest.mark.parametrize(
    ("tab", "asks"),
    [
        ("timeseries", ["timeseries/tags"]),
        ("hparams", ["hparams/session_groups"]),
        ("custom_scalars", ["custom_scalars/layout", "val_ema%2Floss"]),
    ],
)
def test_each_tab_of_tensorboard_finds_the_run(tensorboard, tmp_path, tab, asks):
    """The page asks for the run's own tags, of which it has learnt from the run; its DOM hides the tabs' contents."""
    _, asked = open_page(f"{tensorboard}#{tab}", tmp_path)
    assert [words for words in asks if not any(words in url for url in asked)] == []
    assert all(url.startswith(tensorboard) for url in asked)
