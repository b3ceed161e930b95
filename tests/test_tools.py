"""scripts/tool.py, average.py and check.py."""

import json
import os
import random
import shlex
import shutil
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
import torchvision
from PIL import Image, ImageCms

import data
from bench import benchmark
from errors import ImageError, UserError
from loading.forms import open_source
from scripts import check, evaluate, make_digits, pack, prepare, report, tool
from scripts.trained import open_trained
from settings import config
from tests import fuzz
from tests.exports import refused
from tests.images import FILES, ROTATED, encoded, files_of, write_images
from tests.images import pack as pack_tar
from tests.ranks import Outcome, run_ranks, tool_rank
from tests.runs import state_at
from tests.started import refused as refused_run
from tests.started import run_train
from tests.test_modes import CASES, FOUR16, png


def run(tmp_path: Path, name: str, *argv, largest_file=None) -> Outcome:
    return run_ranks(tool_rank, 1, name, argv, None, None, largest_file, log_folder=tmp_path, timeout_s=60)


@pytest.mark.parametrize(("module", "argv", "words"), [
    (evaluate, "x.pth --set val=. --json a.pth", "a.pth is there already, and only files named *.json"),
    (report, ". --out a.pth", "only files named *.html"),
    (benchmark, "step --json a.pth", "only files named *.json"),
    (make_digits, ".", "a.pth is not one of these digits, and stays"),
    (make_digits, "''", "expected a path, and it is empty"),
    (prepare, ". http:/me:secret@host/p", "argument OUT: expected a local path, not an address"),
    (evaluate, "x.pth --set val=. --html s3://me@bucket/a.html", "--html: expected a local path, not an address"),
    (check, "train", "has no train/"),
    (check, ". --grey-range 4095 0", "--grey-range 4095 0: expected two numbers, the lower first"),
    (pack, "out --data-path . --short-side 8 --grey-range 4095 0", "4095 0: expected two numbers, the lower first"),
    (check, ". --expect-train many", "--expect-train"),
    (check, ". --workers 100000", "--workers 100000"),
    (benchmark, "step --rounds 0", "--rounds"),
    (benchmark, "loader --data-path . --against timm --cores 0", "--cores"),
    (pack, "out --data-path in --short-side 9 --pretrained", "unrecognized argument"),
])  # fmt: skip
def test_a_wrong_command_is_one_line_and_changes_nothing(monkeypatch, capfd, tmp_path, module, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.pth").write_text("kept")
    (tmp_path / "a.pth").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["tool", *shlex.split(argv)])
    with pytest.raises(SystemExit) as end:
        module.main()
    printed = capfd.readouterr()
    assert (end.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed
    assert words in printed.err
    assert "secret" not in printed.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.pth", "a.pth", "train"]
    assert (tmp_path / "a.pth").read_text() == "kept"


@pytest.mark.parametrize(("error", "code", "line"), [
    (OSError(36, "File name too long", "w/xxx"), 2, "w/xxx: File name too long; give another path"),
    (BrokenPipeError(32, "Broken pipe"), 1, "standard output cannot be written: Broken pipe"),
    (OSError(5, "Input/output error", "a"), 1, "[Errno 5] Input/output error: 'a'"),
    (UserError("a\nb\tc"), 2, "a b\tc"),
])  # fmt: skip
def test_every_error_is_one_line(capsys, error, code, line):
    def work():
        raise error

    with pytest.raises(SystemExit) as end:
        tool.run("name", work, "interrupted")
    assert (end.value.code, capsys.readouterr().err) == (code, f"name: error: {line}\n")


def weights_in(path):
    return torch.load(path, weights_only=True)["model"]


def test_a_runs_last_checkpoints_are_averaged(started, tmp_path):
    paths = [started.out / f"checkpoint-{step:08d}.pth" for step in (6, 5)]
    output = tmp_path / "an average.pth"
    outcome = run(tmp_path, "average", started.out, "--last", 2, "--output", output).check()
    assert "--reestimate-bn DATA_PATH" in outcome.output
    found, states = weights_in(output), [weights_in(path) for path in paths]
    assert list(found) == list(states[0])
    for name, tensor in found.items():  # integers are rounded down
        mean = numpy.mean([state[name].numpy() for state in states], axis=0, dtype="float64")
        assert numpy.array_equal(tensor.numpy(), mean.astype(tensor.numpy().dtype)), name
    trained = open_trained(str(output))
    assert (trained.args.model.model, trained.args.augmentation.val_crop_size, len(trained.classes)) == (
        "timm/tiny_test",
        32,
        3,
    )
    assert torch.load(output, weights_only=True)["averaged"] == list(map(str, paths))
    argv = [*started.argv, "--epochs", 1]
    run_train(tmp_path, *argv, "--output-dir", tmp_path / "next", "--weights", output).check()
    resumed = run_train(tmp_path, *argv, "--output-dir", tmp_path / "other", "--resume", output)
    refused_run(resumed, "pass it to --weights")


def test_the_average_of_one_file_is_that_file_in_our_form(tmp_path):
    model = torchvision.models.mnasnet0_5(num_classes=3)
    args = Namespace(model="mnasnet0_5", val_crop_size=192, val_resize_size=200, nested={1: 2})
    torch.save({"model": model.state_dict(), "epoch": 3, "args": args}, tmp_path / "torchvisions.pth")
    wrapped = torch.nn.DataParallel(model).state_dict()
    torch.save({"arch": "mnasnet0_5", "state_dict": wrapped, "best_acc1": 1.0}, tmp_path / "examples.pth")
    for name, sizes in (("torchvisions", (192, 200)), ("examples", (224, 256))):
        run(tmp_path, "average", tmp_path / f"{name}.pth", "--output", tmp_path / "ours.pth").check()
        trained = open_trained(str(tmp_path / "ours.pth"))
        assert trained.args.model.model == "mnasnet0_5"
        assert (trained.args.augmentation.val_crop_size, trained.args.augmentation.val_resize_size) == sizes
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.model.state_dict().items())


def test_checkpoints_that_cannot_be_averaged(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = state_at(2)
    states = {
        "run/checkpoint-00000002": state,
        "run/checkpoint-00000004": state,
        "model": state | {"args": state["args"] | {"model": "vgg11"}},
        "shape": state | {"model": {"weight": torch.ones(3)}},
        "classes": state | {"data": state["data"] | {"classes": ["a", "c"]}},
    }
    for name, content in states.items():
        torch.save(content, tmp_path / f"{name}.pth")
    first, output = folder / "checkpoint-00000002.pth", tmp_path / "averaged.pth"
    os.link(first, folder / "best.pth")
    for argv, words in [
        ([first, tmp_path / "model.pth"], "in its model"),
        ([first, tmp_path / "shape.pth"], "has different weights than"),
        ([first, tmp_path / "classes.pth"], "in its classes"),
        ([first, "--images", 5], "--images has no effect without --reestimate-bn"),
        ([first, folder / "best.pth"], "is the same file as"),
        ([folder, "--last", 5], "holds 2 numbered checkpoints, fewer than --last 5"),
        ([folder, "--last", 2, "--output", folder / "best_ema.pth"], "a run's own checkpoints have such names"),
        ([tmp_path / "shape.pth", "--output", tmp_path / "shape.pth"], "is one of the files"),
    ]:
        assert words in refused(run(tmp_path, "average", "--output", output, *argv), "average")
    assert not output.exists()


def test_statistics_are_those_of_torchs_own_update(started, image_folder, tmp_path):
    checkpoint, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    command = [checkpoint, "--reestimate-bn", image_folder, "--batch-size", 8, "--device", "cpu", "--output"]
    outcome = run(tmp_path, "average", *command, output).check()
    assert "re-estimated on 24 training images" in outcome.output
    trained = open_trained(str(checkpoint))
    images = data.IndexedImageFolder(image_folder / "train", trained.preset)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))[:24]
    batches = [torch.stack([images[number][0] for number in part.tolist()]) for part in order.split(8)]
    expected, before = trained.model, weights_in(checkpoint)
    torch.optim.swa_utils.update_bn(batches, expected)
    found = weights_in(output)
    assert list(found) == list(expected.state_dict())
    moved = set()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)  # pixels are normalised in another order
        moved |= set() if torch.equal(found[name], before[name]) else {name.rsplit(".", 1)[-1]}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}


def test_statistics_that_cannot_be_estimated(started, image_folder, tmp_path):
    plain = torchvision.models.squeezenet1_1(num_classes=3)
    torch.save({"model": plain.state_dict(), "args": {"model": "squeezenet1_1"}}, tmp_path / "plain.pth")
    bad = weights_in(started.out / "checkpoint.pth")
    next(iter(bad.values())).fill_(3e38)
    torch.save({"model": bad, "args": {"model": "timm/tiny_test", "val_crop_size": 32}}, tmp_path / "huge.pth")
    checkpoint, output = started.out / "checkpoint.pth", tmp_path / "new.pth"
    command = ["--device", "cpu", "--output", output, "--reestimate-bn"]
    for name, words in [("plain", "squeezenet1_1 has no BatchNorm"), ("huge", "its statistics are not finite")]:
        outcome = run(tmp_path, "average", tmp_path / f"{name}.pth", *command, image_folder)
        assert words in refused(outcome, "average")
    full = run(tmp_path, "average", checkpoint, *command, image_folder, largest_file=1000)
    assert "cannot be written" in refused(full, "average")
    assert not list(tmp_path.glob("new.pth*"))


COUNTS = ["--expect-train", 29, "--expect-val", 7, "--expect-classes", 3, "--workers", 2]


def look(tmp_path: Path, data_path: Path, *argv) -> tuple[int, dict, dict[str, list[str]]]:
    outcome = run_ranks(
        tool_rank, 1, "check", [data_path, "--json", tmp_path / "report.json", *argv], log_folder=tmp_path
    )
    assert "Traceback" not in outcome.output, outcome.output
    assert not [c for c in outcome.output if (ord(c) < 32 and c not in "\n\r") or 127 <= ord(c) < 160]
    report, found = json.loads((tmp_path / "report.json").read_text()), {}
    assert report["healthy"] == (outcome.codes == [0])
    for finding in report["findings"]:
        images = [(each["image"], each["reason"]) for each in finding["images"]]
        found[finding["kind"]] = [Path(name.split(" in ")[0]).name if name else reason for name, reason in images]
        assert finding["count"] == len(images)
    return outcome.codes[0], report, found


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})


def plant(images: Path) -> dict[str, list[str]]:
    folder = images / "train" / "class0"
    files = sorted(folder.iterdir())
    image = Image.open(files[0]).resize((64, 48))
    payload = files[1].read_bytes()
    files[1].write_bytes(payload[: len(payload) // 2])
    files[2].write_bytes(b"")
    files[3].write_bytes(b"<html>not found</html>")
    files[3] = files[3].rename(folder / "image003\x1b[31m\n.jpg")
    files[4].write_bytes(b"GIF89a" + bytes(100))
    image.convert("CMYK").save(files[5], "JPEG")
    image.save(files[6], "PNG")
    image.save(files[7], "JPEG", exif=ROTATED)
    shutil.copy(files[8], files[9])
    shutil.copy(images / "train" / "class1" / "image003.jpg", images / "val" / "class2" / "image001.jpg")
    grey = numpy.arange(64 * 48, dtype=numpy.uint16).reshape(48, 64) * 20 >> 4
    others = sorted((images / "train" / "class2").iterdir())
    Image.new("RGBA", (64, 48)).save(others[0], "PNG")
    others[1] = others[1].rename(others[1].with_name("z.png"))  # the last, which is always looked at
    Image.fromarray(grey).save(others[1])
    Image.new("F", (64, 48)).save(others[2], "TIFF")
    payload = encoded(image, "AVIF")  # whose header says another size
    others[3].write_bytes(payload.replace(struct.pack(">II", 64, 48), struct.pack(">II", 16, 16)))
    others[4].write_bytes(encoded(image.rotate(90), "AVIF"))
    names = [path.name for path in files]
    return {
        "damaged": [*names[1:5], others[2].name], "leak": ["image001.jpg"], "duplicate": [names[9]],
        "alpha": [others[0].name], "deep": [others[1].name], "scaled": [others[3].name],
        "turned": [names[7]],
    }  # fmt: skip


def pack_into_tars(images: Path, folder: Path) -> Path:
    for split in ("train", "val"):
        pack_tar(folder / f"{split}.tar", files_of(images / split))
    return folder


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_every_planted_defect_is_found(images, tmp_path, form):
    planted = plant(images)
    data_path = images if form == "folder" else pack_into_tars(images, tmp_path / "tars")
    code, report, found = look(tmp_path, data_path, *COUNTS)
    assert code == 1
    words = "train: samples with more than 8 bits use 6% of their range: loaded, their pixels are 0 to 14"
    assert [reason.startswith(words) for reason in found.pop("dark")] == [True]
    assert found == planted
    harmless = {finding["kind"] for finding in report["findings"] if not finding["is_problem"]}
    assert harmless == {"duplicate", "alpha", "deep", "scaled", "turned"}
    reasons = {finding["kind"]: finding["images"][0]["reason"] for finding in report["findings"]}
    assert "truncated" in reasons["damaged"].lower()
    assert reasons["scaled"] == "from 64 x 48"
    assert "class1/image003.jpg" in reasons["leak"]
    assert reasons["leak"].endswith("another class")
    assert "image008.jpg" in reasons["duplicate"]


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_hidden_files_are_listed_with_the_rest_and_a_run_still_refuses_them(images, tmp_path, form):
    hidden = ["train/class0/._image000.jpg", "train/.ipynb_checkpoints/x.jpg", "val/class1/@eaDir/2.jpg/SYNO.jpg"]
    for name in hidden:
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(b"hidden")
    os.truncate(images / "train" / "class1" / "image003.jpg", 300)
    data_path = images if form == "folder" else pack_into_tars(images, tmp_path / "tars")
    for _ in range(2):  # no index is left that lacks them
        code, report, found = look(tmp_path, data_path, *COUNTS)
        assert (code, found.keys(), found["damaged"]) == (1, {"hidden", "damaged"}, ["image003.jpg"])
        with pytest.raises(UserError, match="is hidden"):
            open_source(data_path / "val")
    listed = next(finding["images"] for finding in report["findings"] if finding["kind"] == "hidden")
    assert {each["split"] for each in listed} == {"train", "val"}
    for command in {each["reason"].partition("remove all such: ")[2] for each in listed}:
        subprocess.run(command, shell=True, check=True)
    assert look(tmp_path, data_path, *COUNTS)[2].keys() == {"damaged"}


# Red, green and blue of Display P3 in XYZ under D50, as in the profile that Apple's phones write.
P3 = (0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407)


def profile_of(primaries: tuple) -> bytes:
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for name, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True):
        (place,) = struct.unpack_from(">I", content, content.index(name) + 4)
        struct.pack_into(">iii", content, place + 8, *(round(value * 65536) for value in values))
    return bytes(content)


def test_profiles_that_are_not_srgb_are_counted(images, tmp_path):
    files = sorted((images / "train" / "class0").iterdir())
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profiles = srgb, profile_of(P3), b"no profile", profile_of(((0.9642, 1, 0.8249),) * 3)
    for path, profile in zip(files, profiles, strict=False):
        with Image.open(path) as image:
            image.save(path, "JPEG", icc_profile=profile)
    code, report, found = look(tmp_path, images, *COUNTS)
    assert (code, found) == (0, {"profile": [path.name for path in files[1:4]]})  # which is no problem
    assert report["findings"][0]["images"][1]["reason"] == "cannot be read"


def test_a_file_that_the_disk_does_not_give_is_found_in_a_sample_too(images, tmp_path):
    path = images / "train" / "class0" / "image000.jpg"  # the first and the last are always in it
    path.unlink()
    path.symlink_to(path.name)
    code, report, found = look(tmp_path, images, *COUNTS, "--sample", 5)
    assert (code, found) == (1, {"unreadable": ["image000.jpg"]})
    assert [report["splits"][name]["looked_at"] for name in ("train", "val")] == [5, 5]


def test_counts_are_imagenets_of_synsets_alone_unless_others_are_given(images, tmp_path):
    assert look(tmp_path, images)[0] == 0  # three classes of somebody's own
    for number in range(600):
        (tmp_path / "many" / "train" / f"n{number:08d}").mkdir(parents=True)
        Image.new("L", (number + 1, 1)).save(tmp_path / "many" / "train" / f"n{number:08d}" / "a.png")
    code, _, found = look(tmp_path, tmp_path / "many", "--expect-val", 0)
    assert code == 1
    assert len(found["set"]) == 2  # images and classes of train
    anything = ["--expect-train", "any", "--expect-val", 0, "--expect-classes", "any"]
    assert look(tmp_path, tmp_path / "many", *anything)[0] == 0


def test_a_class_a_tar_and_a_split_that_are_not_whole(images, tmp_path):
    tars = pack_into_tars(images, tmp_path / "tars")
    (images / "val" / "class2").rename(images / "val" / "klass2")
    code, _, found = look(tmp_path, images, *COUNTS)
    assert code == 1
    assert [word in line for word, line in zip(["class2", "klass2"], found["set"], strict=True)] == [True, True]
    os.truncate(tars / "train.tar", (tars / "train.tar").stat().st_size // 2)
    code, _, found = look(tmp_path, tars, *COUNTS)
    assert code == 1
    assert "train.tar is truncated" in found["set"][0]


def odd_files():
    rng = random.Random(0)
    for payload in (*FILES.values(), *(case.values[0] for case in CASES), png(FOUR16[..., :3], 2, bytes(6))):
        yield from (payload, fuzz.scramble(payload, rng, head=300))
    for width, height in [(1, 1), (2, 1), (1, 349), (349, 1), (1, 1365), (1, 1366), (5000, 1), (65537, 1), (1, 65537)]:
        yield encoded(Image.new("RGBA", (width, height)), "PNG")


@pytest.mark.parametrize("options", [[], ["--val-resize-size", "512", "--in-chans", "4"]])
def test_what_is_healthy_is_what_training_and_evaluation_can_load(tmp_path, options):
    for place in (tmp_path / "train" / "a", tmp_path / "val" / "a"):
        place.mkdir(parents=True)
        for number, payload in enumerate(odd_files()):
            (place / f"{number:03d}.png").write_bytes(payload)
    report = look(tmp_path, tmp_path, *[word.replace("--in-chans", "--statistics") for word in options])[1]
    damaged = {each["image"] for kind in report["findings"] if kind["kind"] == "damaged" for each in kind["images"]}
    for backend in ([], ["--backend", "pil"]):
        argv = ["--data-path", str(tmp_path), "--train-crop-size", "24", "--val-crop-size", "24", *options, *backend]
        args, failed = config.parse_args(argv), set()
        for dataset in data.build_datasets(*config.split_dirs(args.data.data_path), args):
            for number in range(len(dataset)):
                try:
                    assert dataset.load(number)[0].shape == (args.data.in_chans, 24, 24)
                except ImageError:
                    failed.add(dataset.index.path(number))
        assert failed == damaged
        assert 50 < len(failed) < number


def test_every_example_of_the_help_is_a_command():
    for module in (check, prepare):
        lines = [line for line in module.get_args_parser().epilog.splitlines() if line.startswith(f"  {module.PROG}")]
        assert len(lines) >= 4
        for line in lines:
            module.get_args_parser().parse_args(shlex.split(line, comments=True)[3:])


def test_a_healthy_set_is_healthy_and_one_for_minival_needs_no_val(images, tmp_path):
    code, report, found = look(tmp_path, images, *COUNTS)
    assert (code, found) == (0, {})
    num_bytes = sum(path.stat().st_size for path in (images / "train").rglob("*.jpg"))
    expected = {"images": 29, "classes": 3, "per_class": "8 to 11", "fewest": "class2", "looked_at": 29}
    assert report["splits"]["train"] == expected | {"bytes": num_bytes}
    shutil.rmtree(images / "val")
    assert "--expect-val 0" in look(tmp_path, images, *COUNTS)[2]["set"][0]
    code, report, found = look(tmp_path, images, *COUNTS, "--expect-val", 0)
    assert (code, found, list(report["splits"])) == (0, {}, ["train"])
