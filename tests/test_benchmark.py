"""bench/benchmark.py and gpu_report.py: each measures real work and writes what it measured, and none is judged."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

from bench import benchmark, gpu_report, race
from errors import UserError
from scripts import tool
from settings import config, machine
from tests.exports import refused, run_tool
from tests.ranks import module_rank, run_ranks, tool_rank
from tests.runs import run_forked
from tests.started import PLAIN

SMALL = "--model squeezenet1_1 --train-crop-size 32 --batch-size 2 --device cpu --rounds 2".split()


def check_figures(tmp_path, ratios, *argv, num_ranks=1, part=None, prepare=()):
    path = tmp_path / "figures.json"
    argv = [*argv, "--json", path]
    run_ranks(module_rank, num_ranks, "bench.benchmark", argv, prepare, log_folder=tmp_path, timeout_s=120).check()
    figures = json.loads(path.read_text())
    figures = figures[part] if part else figures
    assert list(figures["ratios"]) == ratios
    for name, (median, *_) in figures["ratios"].items():
        ways = [figures["rates"][way] for way in name.split(" / ")]
        assert median == pytest.approx(statistics.median(a / b for a, b in zip(*ways, strict=True)))


@pytest.mark.parametrize("name", ["benchmark", "gpu_report", "ledger"])
def test_the_command_of_before_names_the_one_of_now(name, tmp_path):
    outcome = run_ranks(module_rank, 1, f"scripts.{name}", ["--verify"], log_folder=tmp_path)
    assert f"it is python -m bench.{name} now" in refused(outcome, name)


def test_loader(image_folder, tmp_path):
    command = ["loader", "--data-path", image_folder, "--rounds", 2, "--images", 5]
    ways = [str(image_folder)] + [f"{image_folder}, torchcodec"] * bool(machine.find_torchcodec())
    check_figures(tmp_path, [f"{way} / torchvision" for way in ways], *command, part="val")
    assert {"train", "val"} <= json.loads((tmp_path / "figures.json").read_text()).keys()


@pytest.mark.dist
def test_a_step_on_one_process_and_on_several(tmp_path):
    check_figures(tmp_path, ["ours / bare"], "step", *SMALL, "--steps", 2, "--amp", "--amp-dtype", "bfloat16")
    check_figures(tmp_path, ["ours / bare", "same bits / ours"], "step", *SMALL, "--steps", 2, num_ranks=2)


def name_references(folder):
    os.environ["TORCHVISION_REFERENCES"] = folder


def test_our_loop_without_a_part_and_torchvisions_beside_it(tmp_path):
    # Its train.py imports modules of its own by the names of ours, and none of ours may be left in their place.
    (tmp_path / "utils.py").write_text("def read(loss):\n    return loss.item()\n")
    (tmp_path / "train.py").write_text("""import utils
def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    for image, target in data_loader:
        loss = criterion(model(image.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        utils.read(loss)
""")
    parts = ["lines", "loader", "metrics"]
    ratios = [
        "ours / bare",
        "torchvision's / bare",
        "ours / torchvision's",
        *[f"without {part} / bare" for part in parts],
    ]
    check_figures(
        tmp_path, ratios, "step", *SMALL, "--steps", 3, "--without", *parts, prepare=(name_references, str(tmp_path))
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["start_s"].keys() == figures["rates"].keys() == figures["turns"]["rates"].keys()


def test_the_names_of_torchvisions_modules_are_ours_again(tmp_path):
    for name in ("train", "utils"):
        (tmp_path / f"{name}.py").write_text(f"WHO = '{name} of theirs'\n" + "import utils\n" * (name == "train"))
    ours = [sys.modules[name] for name in ("train", "utils")]
    theirs = benchmark.import_train(str(tmp_path))
    assert (theirs.WHO, theirs.utils.WHO) == ("train of theirs", "utils of theirs")
    assert [sys.modules[name] for name in ("train", "utils")] == ours
    assert str(tmp_path) not in sys.path


def test_a_steady_step_is_behind_the_first_ones_and_a_start_is_what_the_first_takes_more():
    way = benchmark.BareStep(benchmark.training_args([*SMALL[:-2]]), 4)
    times = iter([0.0, 50.0, 57.0, 60.0, 62.0])  # the beginning, and the ends of four steps of two images
    way.clock = lambda: next(times)
    assert way() == 8
    assert way.steady_rates == [2 / 2.5]
    assert way.starts_s == [50 - 2.5]


def test_parts_of_our_loop_are_taken_from_a_copy():
    ours = benchmark.OurLoop(benchmark.training_args([*SMALL[:-2]]), 3)
    parts = {part: benchmark.without(ours, part) for part in ("lines", "loader", "metrics")}
    for way in (ours, *parts.values()):
        assert way() == 6
        assert way.model is ours.model
        assert len(way.steady_rates) == 1
    assert ours.args.monitoring.print_freq == ours.run.print_freq == 10
    assert parts["lines"].args.monitoring.print_freq == parts["lines"].run.print_freq == 10**9
    names = [[type(metric).__name__ for metric in way.run.tally.metrics] for way in (ours, parts["metrics"])]
    assert names == [["Loss", "Accuracy"], ["Loss"]]
    assert isinstance(parts["loader"].loader, list)
    assert not isinstance(ours.loader, list)


def test_the_virtual_gpu_forecasts_less_for_a_line_that_waits(tmp_path):
    stdout = tmp_path / "forecast.txt"
    run_ranks(module_rank, 1, "bench.virtual_gpu", [], (), None, stdout, log_folder=tmp_path, timeout_s=300).check()
    lines = stdout.read_text().splitlines()[1:]
    steady = [float(line.rpartition(": ")[2].split(", ")[0]) for line in lines]
    for at_once, later, pinned in (steady[:3], steady[3:6], steady[6:]):
        assert 0.7 < at_once < later <= pinned <= 1


def test_the_bare_step_makes_the_updates_of_the_loop():
    modern = "--model-ema --model-ema-steps 4 --clip-grad-norm 1 --global-batch-size 4 --lr-warmup-epochs 0".split()
    argv = [*SMALL[:-2], *modern, "--lr-scheduler", "steplr", "--no-lr-per-step"]
    args = benchmark.training_args(argv, dropout=0.0)
    loop, bare = benchmark.OurLoop(args, 2), benchmark.BareStep(args, 2)
    loop.loader = [(bare.image, bare.target)] * 4
    assert loop() == bare() == 8
    for ours, theirs in [(loop.model, bare.model), (loop.model_ema, bare.model_ema)]:
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.cluster
def test_a_race(image_folder, tmp_path):
    command = ["loader", "--data-path", image_folder, "--rounds", 2, "--images", 9, "--batch-size", 4]
    command += ["--against", "ours-pillow", "torchvision", "torchvision-uint8", "--cores", 2]
    ratios = [f"ours / {name}" for name in ("ours-pillow", "torchvision", "torchvision-uint8")]
    check_figures(tmp_path, ratios, *command)
    rows = json.loads((tmp_path / "figures.json").read_text())["loaders"][1:]
    psnr = {name: float(words.partition(" ")[0]) for name, _, _, words, _ in rows}
    assert psnr["torchvision"] == psnr["torchvision-uint8"] == 99
    assert psnr["ours"] == psnr["ours-pillow"] > 40


def test_a_loader_that_is_not_installed_is_one_line_and_starts_nothing(tmp_path):
    if find_spec("streaming"):
        pytest.skip("it is installed")
    command = "loader", "--data-path", tmp_path, "--against", "streaming"
    outcome, output = run_tool(tmp_path, "bench.benchmark", *command, code=2)
    assert output == ""
    assert "--against streaming: not installed; pip install " in outcome.output.splitlines()[-1]


def two_batches(numbers, seed=0):
    images = numpy.random.default_rng(seed).integers(0, 256, (len(numbers), 3, 224, 224), dtype=numpy.uint8)
    return lambda: iter([(images[:2], numpy.array(numbers[:2])), (torch.from_numpy(images[2:]), numbers[2:])])


@pytest.mark.parametrize(("numbers", "seed", "words"), [
    ([3, 1, 0], 1, "3 of 4 images in 3 crops"), ([0, 1, 2, 2], 1, "3 of 4 images in 4"),
    ([0, 1, 2, 3, 3], 1, "4 of 4 images in 5"), ([0, 1, 2, 3], 0, "the same crops"),
])  # fmt: skip
def test_a_pass_shows_each_image_once_in_other_crops(numbers, seed, words):
    first = race.make_pass(two_batches([0, 1, 2, 3]), 4, [])
    assert len(race.make_pass(two_batches([3, 1, 0, 2], 1), 4, first)) == 4
    with pytest.raises(ValueError, match=words):
        race.make_pass(two_batches(numbers, seed), 4, first)


def test_the_cpu_time_of_a_group_is_that_of_all_its_processes():
    burn = "import time, threading, resource, subprocess, sys\nwhile time.process_time() < 0.3: pass\n"
    more = "thread = threading.Thread(target=lambda: sum(range(3_000_000))); thread.start(); thread.join()\n"
    more += "subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    more += "used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
    more += "print(sum(each.ru_utime + each.ru_stime for each in used), flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", burn + more, burn], process_group=0, **pipes) as process:
        expected = float(process.stdout.readline())
        assert race.cpu_seconds({process.pid}) == pytest.approx(expected, abs=0.03)
        process.communicate("\n")
    assert expected > 0.6


def without_tests(words, **how):
    if "pytest" in words:
        return subprocess.CompletedProcess("tests of a GPU", 5, "", "")
    return run_forked(words, **how)


def test_on_a_cpu_there_are_no_rows_of_gpus_and_no_table(tmp_path, image_folder, monkeypatch, capsys):
    report_file, page = tmp_path / "report.json", tool.ROOT / "docs" / "performance.md"
    argv = ["--device", "cpu", "--model", PLAIN, "--crop", 32, "--batch-size", 2, "--steps", 20, "--json", report_file]
    before = page.read_text()

    def report(*more):
        monkeypatch.setattr("sys.argv", ["gpu_report", *map(str, [*argv, *more])])
        with pytest.raises(SystemExit, match=r"^0$"):
            gpu_report.main()
        return json.loads(report_file.read_text())["rows"]

    monkeypatch.setattr(gpu_report.subprocess, "run", without_tests)
    rows, run, output = report(), f"{PLAIN}, batch 2, bfloat16, NHWC", capsys.readouterr().out
    bits = "a run of two epochs, and one resumed after the first"
    assert rows.keys() == {run, "step, float32", bits, "`resnet50-fast16`, made-up images"}, output
    assert rows[bits]["result"] == "the same bits"
    assert rows[run].keys() == {"images_per_s", "data_wait", "memory_gib", "first_step_s", "eval_images_per_s", "date"}
    assert "tests of `-m gpu`: not measured" in output
    assert page.read_text() == before
    after = report("--data-path", image_folder, "--only", "JPEGs")  # which keep the others
    assert {name: after[name] for name in rows} == rows
    assert [name.split(", ")[2:4:2] for name in after if name not in rows] == [["JPEGs"]]


def test_a_part_is_tried_on_a_cpu_and_a_second_call_makes_what_is_missing(tmp_path, image_folder, monkeypatch, capsys):
    report_file = tmp_path / "report.json"
    argv = ["--device", "cpu", "--model", PLAIN, "--crop", 32, "--batch-size", 2, "--steps", 4, "--json", report_file]
    monkeypatch.setattr(gpu_report, "read_tests", lambda folder: {"result": "not run here"})
    monkeypatch.setattr(gpu_report.subprocess, "run", without_tests)

    def report(*more, code="0"):
        monkeypatch.setattr("sys.argv", ["gpu_report", *map(str, [*argv, *more])])
        with pytest.raises(SystemExit, match=f"^{code}$"):
            gpu_report.main()
        return json.loads(report_file.read_text())["rows"]

    first = report("--part", 1)
    assert list(first) == ["tests of `-m gpu`", "step, float32", "step, --workers 0"], capsys.readouterr().out
    assert first["step, float32"]["ratios"].count("without") == 3
    assert report("--part", 1, code="2") == first
    assert capsys.readouterr().out.count("measured before") == 3
    second = report("--part", 3, "--data-path", image_folder)
    assert {name: second[name] for name in first} == first
    trained = [found["result"] for name, found in second.items() if name not in first]
    assert len(trained) == 2
    for result in trained:
        assert re.fullmatch(r"Acc@1 \d+\.\d\d of 7 images in \d+\.\d minutes", result)


@pytest.mark.parametrize(("row", "limit_s", "words"), [
    (gpu_report.Row("a", ["-c \"raise SystemExit('train.py: error: no memory')\""], str), 60, "no memory"),
    (gpu_report.Row("a", ["-c 'import time; time.sleep(60)'"], str), 0, "the minutes are over"),
    (gpu_report.Row("a", [], gpu_report.read_step), 60, "FileNotFoundError"),
])  # fmt: skip
def test_what_fails_has_no_result_and_a_line_that_says_why(row, limit_s, words, tmp_path, capsys):
    assert gpu_report.measure(row, tmp_path, time.monotonic() + limit_s) is None
    assert words in capsys.readouterr().out


def test_readers_tell_a_good_result_from_a_bad_one(tmp_path):
    for name, value in {"whole": 1.0, "resumed": 2.0}.items():
        (tmp_path / name).mkdir()
        torch.save({"model": {"a": torch.tensor(value), "b": torch.tensor(0.0)}}, tmp_path / name / "checkpoint.pth")
    assert gpu_report.read_resume(tmp_path) == {"result": "1 of 2 tensors differ"}
    suite = "<testsuites><testsuite tests='5' failures='{0}' errors='{0}' skipped='{1}'/></testsuites>"
    (tmp_path / "tests.xml").write_text(suite.format(1, 2))
    assert gpu_report.read_tests(tmp_path) == {"result": "1 passed, 2 failed, 2 skipped"}
    (tmp_path / "tests.xml").write_text(suite.format(0, 5))
    with pytest.raises(UserError, match="every test was skipped"):
        gpu_report.read_tests(tmp_path)


def test_a_runs_figures_are_of_all_lines_but_the_first(tmp_path):
    # 32 images a step; the first takes 5 s, each other one 0.1 s; the second evaluation 2 s for 400 images.
    rates = {10: 320 / 5.9, 20: 320.0, 30: 320.0}
    base = {"epoch": 0, "time": 0.0}
    records = [
        {"kind": "train", "step": step, "images": 32 * step, "images_per_s": rate, "data_wait": 0.25, "memory_gib": 3.0}
        for step, rate in rates.items()
    ]
    ends = {"epoch": 1.0, "val": 1.0 + 2 / 3600}
    records += [{"kind": kind, "step": 30, "n": 400, "hours": hours} for kind, hours in ends.items()]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(base | each) + "\n" for each in records))
    expected = {"images_per_s": 320, "data_wait": 0.25, "memory_gib": 3, "first_step_s": 5, "eval_images_per_s": 200}
    assert gpu_report.read_run("run", tmp_path) == pytest.approx(expected)


def test_torchvisions_rate_counts_the_wait_for_data(tmp_path):
    line = "Epoch: [0]  [{0}/40]  eta: 0:00:01  lr: 0.1  loss: 6.9 (7.0)  img/s: 999.0 (900.0)  time: {1}  data: 0.1\n"
    (tmp_path / "output.txt").write_text("".join(map(line.format, (0, 10, 20), (9.0, 0.4, 0.4))) + "Test: time: 1\n")
    assert gpu_report.read_torchvisions(8, tmp_path) == pytest.approx({"images_per_s": 20, "data_wait": 0.25})


def test_a_rate_is_judged_by_one_process_the_cards_peak_and_a_published_one():
    # ResNet-50 has 4.09 G products of the forward pass (torchvision's page), a third of those of a step.
    assert gpu_report.count_flops("resnet50", None) == pytest.approx(6 * 4.09e9, rel=0.01)
    row = gpu_report.Row("resnet50", [], str, "resnet50")
    for rate, is_bad in {1500: True, 2000: False}.items():
        found = {"images_per_s": rate}
        gpu_report.judge(row, found, {}, "NVIDIA H100 80GB HBM3", None)
        assert found["mfu"] == pytest.approx(rate * 6 * 4.09e9 / 989e12, rel=0.01)
        assert ("something is wrong" in found["published"]) is is_bad
    found = {"images_per_s": 3000}
    gpu_report.judge(row._replace(processes=4, single="one"), found, {"one": {"images_per_s": 1000}}, "RTX 9999", None)
    assert found == {"images_per_s": 3000, "efficiency": 0.75}


def test_four_gpus_have_rows_of_one_two_and_four(tmp_path):
    options = Namespace(device="cuda", model=["resnet50", "vit_b_16"], batch_size=[8, 4], steps=50, crop=None)
    options.data_path = options.part = None
    rows = list(gpu_report.build_rows(options, tmp_path, 4))
    runs = [row for row in rows if row.model]
    assert [(row.model, row.processes) for row in runs] == [
        *[("resnet50", count) for count in (1, 1, 2, 4, 1, 1)], *[("vit_b_16", 1)] * 4
    ]  # fmt: skip
    assert [row.single for row in runs if row.processes > 1] == [runs[1].name] * 2
    assert "--nproc_per_node=4" in runs[3].commands[0]
    for row in runs:
        words = shlex.split(row.commands[0])
        config.parse_args(words[words.index("train.py") + 1 :])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path):
    refused(run_ranks(tool_rank, 1, "bench.gpu_report", [], log_folder=tmp_path), "bench.gpu_report", 2)
    assert not Path("gpu-report.json").exists()
