"""scripts/export.py and predict.py: every form holds the checkpoint's model, by plain torchvision as the oracle."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.endings import differing
from tests.exports import CLASSES, MODEL, plain_model, plain_probabilities, refused, run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import REPOSITORY, module_rank, run_ranks

# Of a logit, those of the model are about 3, or of a probability: kernels sum in other orders.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = write_checkpoint(folder)
    forms = ["--format", "weights", "safetensors", "onnx", "torch-export"]
    return checkpoint, folder / "out", run_tool(folder, "export", checkpoint, *forms, "--output", folder / "out")[1]


def test_only_whole_files_are_there_and_the_output_names_each(exported):
    _, out, output = exported
    names = {path.name for path in out.iterdir()}
    files = json.loads((out / f"{MODEL}.json").read_text())["files"]
    assert names == {*files, f"{MODEL}.json"}
    assert {Path(name).suffix for name in files} == {".pth", ".onnx", ".pt2", ".safetensors"}
    for name, facts in files.items():
        assert facts["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    lines = output.splitlines()
    assert [line.split(":")[0] for line in lines] == "preprocessing weights safetensors onnx torch-export".split()
    assert all("largest difference of logits" in line for line in lines[3:5]), output


def test_weights_and_safetensors_load_into_torchvision_bear_their_hash_and_say_what_they_are(exported, tmp_path):
    checkpoint, out, _ = exported
    path, expected = next(out.glob("*.pth")), plain_model(checkpoint).state_dict()
    assert path.name == f"{MODEL}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
    where = {"model_dir": str(tmp_path), "check_hash": True, "progress": False, "weights_only": True}
    assert differing(torch.hub.load_state_dict_from_url(path.as_uri(), **where), expected) == []
    path = out / f"{MODEL}.safetensors"
    assert differing(load_file(path), expected) == []
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    assert (texts["model"], json.loads(texts["classes"])) == (MODEL, CLASSES)
    preprocessing = json.loads(texts["preprocessing"])
    assert "as in the checkpoint" in preprocessing.pop("origin")
    assert preprocessing == {
        "resize_size": 40, "crop_size": 32, "interpolation": "bicubic", "backend": "pil",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "crop_mode": "center", "exif": False, "grey_range": None,
    }  # fmt: skip


def test_onnx_and_programs_take_any_number_of_images_and_need_no_other_file(exported):
    checkpoint, out, _ = exported
    model, program = plain_model(checkpoint), torch.export.load(out / f"{MODEL}.pt2").module()
    alone = (out / f"{MODEL}.onnx").read_bytes()  # from memory, so that no other file can be read
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("input", ["batch", 3, 32, 32])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("logits", ["batch", 4])]
    for batch_size in (1, 5):
        images = torch.randn(batch_size, 3, 32, 32)
        with torch.no_grad():
            expected, found = model(images), program(images)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        found = torch.from_numpy(session.run(None, {"input": images.numpy()})[0])
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_the_page_shows_how_to_use_it_without_this_project(made, tmp_path):
    checkpoint, out, _, files = made
    (block,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "tools.md").read_text(), flags=re.S)
    code = block.replace("published/resnet50.onnx", f"{out / MODEL}.onnx").replace("photos/1.jpg", files[0])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    name, share = done.stdout.rsplit(maxsplit=1)
    expected, best = plain_probabilities(plain_model(checkpoint), files[0]).max(0)
    assert name == CLASSES[best]
    assert float(share) == pytest.approx(expected.item(), abs=TOLERANCE)


def test_average_lies_beside_the_raw_weights_and_another_checkpoint_is_refused(exported, tmp_path):
    checkpoint, _, _ = exported
    for extra in ([], ["--ema"]):
        run_tool(tmp_path, "export", checkpoint, "--format", "weights", "--output", tmp_path / "out", *extra)
    for end, key in (("", "model"), ("-ema", "model_ema")):
        expected = plain_model(checkpoint, key).state_dict()
        found = torch.load(next((tmp_path / "out").glob(f"{MODEL}{end}-????????.pth")), weights_only=True)
        assert differing(found, expected) == []
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = write_checkpoint(tmp_path, "other.pth", seed=5)
    outcome, _ = run_tool(tmp_path, "export", other, "--format", "weights", "--output", tmp_path / "out", code=2)
    assert "describes other weights" in refused(outcome, "export")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def move_a_number():
    save = safetensors.torch.save

    def wrong(tensors, metadata):
        tensors["classifier.1.bias"] = torch.nextafter(tensors["classifier.1.bias"], torch.tensor(9.0))
        return save(tensors, metadata)

    safetensors.torch.save = wrong


def test_a_file_that_is_not_the_checkpoint_gets_no_name(exported, tmp_path):
    argv = [exported[0], "--format", "safetensors", "--output", tmp_path / "out"]
    outcome = run_ranks(module_rank, 1, "scripts.export", argv, (move_a_number,), log_folder=tmp_path)
    assert "read back and classifier.1.bias differs from the checkpoint's" in refused(outcome, "export")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory):
    """The checkpoint, what it is exported to, a folder of images of which some lie deeper, and their paths."""
    checkpoint, out, _ = exported
    images = write_images(tmp_path_factory.mktemp("images") / "images", {"train": [2, 1], "val": [2]}, size=(60, 50))
    (images / "notes.txt").write_text("no image")
    return checkpoint, out, images, sorted(map(str, images.rglob("*.jpg")))


def test_json_stands_alone_on_standard_output_and_tables_say_the_same(made, tmp_path):
    _, out, _, files = made
    hostile = tmp_path / "a <b>&, 'c'.jpg"
    hostile.write_bytes(Path(files[0]).read_bytes())
    files, stdout = [str(hostile), *files[::-1]], tmp_path / "stdout"
    argv = [out / f"{MODEL}.pt2", *files, "--json", "--topk", 2, "--csv", tmp_path / "found.csv"]
    done = run_ranks(module_rank, 1, "scripts.predict", argv, (), None, stdout, log_folder=tmp_path).check()
    predictions = json.loads(stdout.read_text())["images"]
    assert [(each["file"], len(each["top"])) for each in predictions] == [(file, 2) for file in files]
    assert all(line.startswith(("predicting: ", "preprocessing: ")) for line in done.output.splitlines()), done.output
    # As a spreadsheet reads it, which knows UTF-8 by its mark.
    content = (tmp_path / "found.csv").read_bytes()
    header, *rows = csv.reader(content.removeprefix("\ufeff".encode()).decode().splitlines())
    assert content.startswith("\ufeff".encode())
    assert header == ["file", "true class", "predicted 1", "share 1", "predicted 2", "share 2"]
    table = run_tool(tmp_path, "predict", *argv[:-5])[1].splitlines()
    for row, line, each in zip(rows, table, predictions, strict=True):
        assert row[:2] == [each["file"], ""]
        expected = [(best["class"], pytest.approx(best["probability"], rel=1e-5)) for best in each["top"]]
        assert [*zip(row[2::2], map(float, row[3::2]), strict=True)] == expected
        assert line.startswith(each["file"])
        assert f"{100 * each['probability']:5.1f}% {each['class']}" in line


def test_published_weights_are_opened_by_name(tmp_path):
    """From torch's cache, where a file of the right name stands for the one of the network."""
    torch.manual_seed(1)
    model = torchvision.models.squeezenet1_1().eval()
    published, cache = torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1, tmp_path / "checkpoints"
    cache.mkdir()
    torch.save(model.state_dict(), cache / os.path.basename(published.url))
    images = write_images(tmp_path / "images", {"val": [1]}, size=(300, 260))
    argv, home = ["squeezenet1_1.IMAGENET1K_V1", images, "--json", "--topk", 1000], (torch.hub.set_dir, str(tmp_path))
    run_ranks(module_rank, 1, "scripts.predict", argv, home, None, tmp_path / "stdout", log_folder=tmp_path).check()
    [prediction] = json.loads((tmp_path / "stdout").read_text())["images"]
    image = published.transforms()(Image.open(prediction["file"]).convert("RGB"))
    with torch.no_grad():
        expected = model(image[None]).double().softmax(dim=1)[0]
    assert prediction["class"] == published.meta["categories"][int(expected.argmax())]
    assert prediction["probability"] == pytest.approx(expected.max().item(), abs=TOLERANCE)


def test_a_list_is_read_and_the_page_begins_with_the_least_sure(made, tmp_path):
    checkpoint, _, _, files = made
    content = torch.load(checkpoint, weights_only=True)
    content["data"]["classes"] = ["class0", "class1", "<c>", "d"]
    torch.save(content, tmp_path / "named.pth")
    shutil.copy(files[0], tmp_path / "1.jpg")
    # The folders of `files` have the names of classes; a list has its own.
    rows = [{"path": files[1], "label": "d"}, {"path": "1.jpg"}, {"path": "1.jpg", "label": "<c>"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [tmp_path / "named.pth", tmp_path / "a.jsonl", *files[2:], "--json", "--html", tmp_path / "page.html"]
    predictions = json.loads(run_tool(tmp_path, "predict", *argv)[1])["images"]
    assert [each["file"] for each in predictions] == [files[1], *[str(tmp_path / "1.jpg")] * 2, *files[2:]]
    truths = ["d", None, "<c>", *(Path(file).parent.name for file in files[2:])]
    pairs = sorted(zip(predictions, truths, strict=True), key=lambda pair: pair[0]["probability"])
    lines = []
    for each, truth in pairs:
        shares = [f"{top['probability']:.1%} {top['class']}" for top in each["top"]]
        lines.append([each["file"], *shares, f"is {truth}" if truth else ""])
    page = (tmp_path / "page.html").read_text()
    found = [part.split("<br>") for part in re.findall("<figcaption>(.*?)</figcaption>", page)]
    assert json.dumps(found) == json.dumps(lines).replace("<c>", "&lt;c&gt;")
    num_right = sum(each["class"] == truth for each, truth in pairs)
    assert f"<td>images of a known class<td>{len(pairs) - 1}<tr><td>right<td>{num_right}<" in page


def test_classes_are_numbers_where_nothing_names_them_and_unreadable_images_are_named(made, tmp_path):
    checkpoint, _, images, files = made
    torch.save(torch.load(checkpoint, weights_only=True)["model"], tmp_path / "bare.pth")
    truncated, empty, pipe = (tmp_path / name for name in ("truncated.jpg", "empty.png", "pipe.jpg"))
    truncated.write_bytes(Path(files[0]).read_bytes()[:300])
    empty.write_bytes(b"")
    os.mkfifo(pipe)  # which nobody writes to
    sizes = ["--val-resize-size", 40, "--val-crop-size", 32, "--interpolation", "bicubic"]
    argv = [truncated, images, empty, pipe, "--json", "--model", MODEL, *sizes]
    outcome, output = run_tool(tmp_path, "predict", tmp_path / "bare.pth", *argv, code=1)
    model, found = plain_model(checkpoint), json.loads(output)["images"]
    for each, file in zip(found, files, strict=True):
        shares, order = plain_probabilities(model, file).sort(descending=True)
        assert [int(top["class"]) for top in each["top"]] == order.tolist()
        assert [top["probability"] for top in each["top"]] == pytest.approx(shares.tolist(), abs=TOLERANCE)
        assert each == {"file": file, **each["top"][0], "top": each["top"]}
    named = [line.split(" cannot be read: ")[0] for line in outcome.output.splitlines() if " cannot be read: " in line]
    assert [Path(name).name for name in named] == [truncated.name, empty.name, pipe.name]


def test_mistakes_are_one_line(made, tmp_path, monkeypatch, capsys):
    checkpoint, out, images, _ = made
    (tmp_path / "empty").mkdir()
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "data": {"classes": ["a", "b"]}}, tmp_path / "two.pth")
    (tmp_path / "lost.csv").write_text("path\nlost.jpg\n")
    (tmp_path / "wrong.csv").write_text(f"path,label\n{images}/train/class0/image000.jpg,e\n")
    for ending in ("onnx", "pt2", "safetensors"):
        (tmp_path / f"junk.{ending}").write_bytes(b"junk")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "foreign.pt2")
    write_checkpoint(tmp_path, "other.pth", args={"model": "no_such_model"})
    content["model"]["classifier.1.bias"][0] = torch.nan
    torch.save(content, tmp_path / "nan.pth")
    monkeypatch.chdir(tmp_path)
    published = ["--output", tmp_path / "out", "--format"]
    for name, argv, words in [
        ("predict", ["gone.pth", images], "gone.pth: no such file"),
        ("predict", [checkpoint, "gone.jpg"], "gone.jpg: no such file or folder"),
        ("predict", [checkpoint, "empty"], "empty holds no images"),
        ("predict", [checkpoint, "lost.csv"], "lost.csv, line 2: lost.jpg is no file; the column path"),
        ("predict", [checkpoint, "wrong.csv"], "label 'e' is no class's name in the checkpoint; correct or"),
        ("predict", ["two.pth", images], "has a classifier for 4 classes, but the data has 2"),
        ("predict", [checkpoint, images, "--device", "meta"], "finds no such device on this machine; try --device cpu"),
        ("predict", [out / f"{MODEL}.onnx", images, "--ema", "--device", "cuda"], "leave out --ema and --device"),
        ("predict", ["junk.onnx", images], "junk.onnx cannot be opened"),
        ("predict", ["junk.pt2", images], "junk.pt2 cannot be opened"),
        ("predict", ["junk.safetensors", images], "junk.safetensors is damaged or no safetensors file"),
        ("predict", ["foreign.pt2", images], "foreign.pt2 does not say how its images are prepared"),
        ("predict", ["nan.pth", images], "nan.pth are not finite: its weights are broken"),
        ("export", ["nan.pth", *published, "weights"], "nan.pth are not finite: its weights are broken"),
        ("export", [checkpoint, *published, "onxx"], "onxx"),
        ("export", ["other.pth", *published, "onnx"], "no_such_model: not a torchvision classification model"),
    ]:
        outcome, output = run_tool(tmp_path, name, *argv, code=5 if "nan" in str(argv[0]) else 2)
        assert words in refused(outcome, name, outcome.codes[0]), outcome.output
        assert output == "" or name == "export"
    assert not list(tmp_path.glob("out/*"))


def test_damaged_description_is_one_line(made, tmp_path):
    _, out, images, _ = made
    path = out / f"{MODEL}.safetensors"
    with safe_open(path, "pt") as file:
        texts, weights = file.metadata(), load_file(path)
    preprocessing = json.loads(texts["preprocessing"])
    for change in (
        {"preprocessing": json.dumps({**preprocessing, "crop_size": -1})},
        {"preprocessing": json.dumps({**preprocessing, "mean": [0, 0]})},
        {"preprocessing": "{"},
        {"classes": '["one"]'},
        {"num_classes": "many"},
        {"model": "no\nmodel"},
    ):
        path = tmp_path / "damaged.safetensors"
        safetensors.torch.save_file(weights, path, {**texts, **change})
        outcome, _ = run_tool(tmp_path, "predict", path, images, code=2)
        assert "its description is damaged" in refused(outcome, "predict")
