"""scripts/export.py and predict.py: every form holds the checkpoint's model, by plain torchvision as the oracle."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

from tests.exports import CLASSES, MODEL, plain_model, plain_probabilities, refused, run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import module_rank, run_ranks, tool_rank

# Of a logit, those of the model are about 3, or of a probability: kernels sum in other orders.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run's folder with a checkpoint, and its export in each form that takes no compiler."""
    folder = tmp_path_factory.mktemp("exported")
    run = folder / "run"
    run.mkdir()
    checkpoint = write_checkpoint(run)
    images = write_images(folder / "images", {"train": [3, 3, 3, 3], "val": [2, 2, 2, 2]}, size=(60, 50))
    forms = ["--format", "weights,safetensors", "--format", "onnx,torch-export,int8"]
    argv = [checkpoint, *forms, "--calibration", images / "train", "--output", folder / "out"]
    _, output = run_tool(folder, "export", *argv)
    return checkpoint, folder / "out", output


def probe(batch_size):
    return torch.randn(batch_size, 3, 32, 32, generator=torch.Generator().manual_seed(batch_size))


def logits(model, images):
    with torch.no_grad():
        return model(images)


def test_only_whole_files_are_there_and_the_output_names_each(exported):
    _, out, output = exported
    names = sorted(path.name for path in out.iterdir())
    hashed = next(name for name in names if name.endswith(".pth"))
    rest = [f"{MODEL}{end}" for end in (".json", ".onnx", ".pt2", ".safetensors", "-int8.pt2")]
    assert names == sorted([hashed, *rest])
    for name, facts in json.loads((out / f"{MODEL}.json").read_text())["files"].items():
        assert facts["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        names.remove(name)
    assert names == [f"{MODEL}.json"]
    lines = output.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "preprocessing", "weights", "safetensors", "onnx", "torch-export", "int8",
    ]  # fmt: skip
    assert all("largest difference of logits" in line for line in lines[3:5]), output


def test_weights_bear_their_hash_as_torch_hub_checks_it_and_load_into_torchvision(exported, tmp_path, monkeypatch):
    checkpoint, out, _ = exported
    path = next(out.glob("*.pth"))
    assert (
        re.fullmatch(rf"{MODEL}-([0-9a-f]{{8}})\.pth", path.name)[1]
        == hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    )
    weights = torch.hub.load_state_dict_from_url(
        path.as_uri(), model_dir=str(tmp_path), check_hash=True, progress=False, weights_only=True
    )
    model = torchvision.models.get_model(MODEL, num_classes=4)
    model.load_state_dict(weights)
    expected = torch.load(checkpoint, weights_only=True)["model"]
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_safetensors_hold_the_same_weights_and_say_what_they_are(exported):
    safetensors = pytest.importorskip("safetensors")
    checkpoint, out, _ = exported
    expected = torch.load(checkpoint, weights_only=True)["model"]
    with safetensors.safe_open(out / f"{MODEL}.safetensors", "pt") as file:
        texts = file.metadata()
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), expected[name]) for name in expected)
    assert (texts["model"], json.loads(texts["classes"])) == (MODEL, CLASSES)
    preprocessing = json.loads(texts["preprocessing"])
    assert "as in the checkpoint" in preprocessing.pop("origin")
    assert preprocessing == {
        "resize_size": 40, "crop_size": 32, "interpolation": "bicubic", "backend": "pil",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
    }  # fmt: skip


def test_onnx_is_one_file_that_takes_any_number_of_images(exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint, out, _ = exported
    model = plain_model(checkpoint)
    alone = (out / f"{MODEL}.onnx").read_bytes()  # from memory, so that no other file can be read
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("input", ["batch", 3, 32, 32])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("logits", ["batch", 4])]
    for batch_size in (1, 5):
        found = torch.from_numpy(session.run(None, {"input": probe(batch_size).numpy()})[0])
        torch.testing.assert_close(found, logits(model, probe(batch_size)), rtol=0, atol=TOLERANCE)
    texts = session.get_modelmeta().custom_metadata_map
    assert json.loads(texts["classes"]) == CLASSES


def test_program_computes_the_same_without_this_code(exported):
    checkpoint, out, _ = exported
    program = torch.export.load(out / f"{MODEL}.pt2", extra_files=(files := {"touchstone.json": ""})).module()
    for batch_size in (1, 5):
        expected = logits(plain_model(checkpoint), probe(batch_size))
        torch.testing.assert_close(logits(program, probe(batch_size)), expected, rtol=0, atol=TOLERANCE)
    assert json.loads(files["touchstone.json"])["model"] == MODEL


def test_int8_is_a_third_as_large_and_computes_nearly_the_same(exported):
    pytest.importorskip("torchao")
    checkpoint, out, output = exported
    program = torch.export.load(out / f"{MODEL}-int8.pt2").module()
    for batch_size in (1, 5):
        expected, found = logits(plain_model(checkpoint), probe(batch_size)), logits(program, probe(batch_size))
        assert not torch.equal(found, expected)
        # Eight bits an activation, through 26 layers.
        assert (found - expected).norm() < 0.5 * expected.norm()
    weights = program.state_dict().values()
    assert sum(each.nbytes for each in weights) < sum(p.nbytes for p in plain_model(checkpoint).parameters()) / 2.5
    assert re.search(r"int8: .*the same class as the checkpoint for \d+\.\d\d% of 12 images", output)


def test_average_is_exported_by_choice_beside_the_raw_weights(exported, tmp_path):
    checkpoint, _, _ = exported
    argv = [checkpoint, "--format", "weights", "--output", tmp_path / "out"]
    for extra in ([], ["--ema"]):
        run_tool(tmp_path, "export", *argv, *extra)
    raw, average = (next((tmp_path / "out").glob(f"{MODEL}{end}-????????.pth")) for end in ("", "-ema"))
    for path, key in ((raw, "model"), (average, "model_ema")):
        expected, found = plain_model(checkpoint, key).state_dict(), torch.load(path, weights_only=True)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mistakes_are_one_line_and_leave_nothing(exported, tmp_path):
    checkpoint, _, _ = exported
    other = write_checkpoint(tmp_path, "other.pth", args={"model": "no_such_model"})
    bare = tmp_path / "bare.pth"
    torch.save({"weight": torch.ones(2)}, bare)
    (tmp_path / "file").write_text("")
    onto = tmp_path / "out"
    for argv, words in [
        ([checkpoint, "--format", "onxx"], "onxx is none; there are weights, safetensors, onnx"),
        ([other, "--format", "onnx"], "no_such_model is no classification model of torchvision"),
        ([bare, "--format", "onnx", "--model", MODEL], "belongs to another model"),
        ([checkpoint, "--format", "int8"], "--format int8 needs images to calibrate with"),
        ([checkpoint, "--format", "int8", "--calibration", tmp_path / "file"], "/file cannot be read"),
        ([checkpoint, "--format", "weights", "--output", tmp_path / "file" / "out"], "Not a directory"),
    ]:
        outcome, _ = run_tool(tmp_path, "export", *argv, *["--output", onto][: 0 if "--output" in argv else 2], code=2)
        assert words in refused(outcome, "export"), outcome.output
    assert not list(onto.glob("*"))


def test_another_checkpoint_does_not_mix_with_the_files_of_one(exported, tmp_path):
    checkpoint, _, _ = exported
    run_tool(tmp_path, "export", checkpoint, "--format", "weights", "--output", tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = write_checkpoint(tmp_path, "other.pth", seed=5)
    outcome, _ = run_tool(tmp_path, "export", other, "--format", "weights", "--output", tmp_path / "out", code=2)
    assert "describes other weights" in refused(outcome, "export")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    again = ["--format", "safetensors", "--val-crop-size", 32]  # the same size, from another origin
    run_tool(tmp_path, "export", checkpoint, *again, "--output", tmp_path / "out")
    assert len(json.loads((tmp_path / "out" / f"{MODEL}.json").read_text())["files"]) == 2


def test_full_disk_is_one_line_and_leaves_nothing_half_written(exported, tmp_path):
    checkpoint, _, _ = exported
    argv = [checkpoint, "--format", "weights", "--output", tmp_path / "out"]
    outcome, _ = run_tool(tmp_path, "export", *argv, largest_file=100_000, code=2)
    assert re.search(r"\.pth cannot be written: .*allows no file so large", refused(outcome, "export"))
    assert list((tmp_path / "out").iterdir()) == []


def export_through_a_wrong_library(argv):
    """Run the tool with a safetensors that moves one number of one weight."""
    import safetensors.torch

    from scripts import export

    save = safetensors.torch.save

    def wrong(tensors, metadata):
        tensors["classifier.1.bias"] = torch.nextafter(tensors["classifier.1.bias"], torch.tensor(9.0))
        return save(tensors, metadata)

    safetensors.torch.save = wrong
    sys.argv = ["export", *map(str, argv)]
    export.main()


def test_a_file_that_is_not_the_checkpoint_gets_no_name(exported, tmp_path):
    checkpoint, _, _ = exported
    argv = [checkpoint, "--format", "safetensors", "--output", tmp_path / "out"]
    outcome = run_ranks(export_through_a_wrong_library, 1, argv, log_folder=tmp_path)
    assert outcome.codes == [2], outcome.output
    assert "read back and classifier.1.bias differs from the checkpoint's" in refused(outcome, "export")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_int8_is_measured_on_val(exported, tmp_path):
    """Its accuracy on the images of val, by plain torchvision for the floats."""
    pytest.importorskip("torchao")
    images = write_images(tmp_path / "images", {"train": [3, 3, 3, 3], "val": [2, 3, 2, 4]}, size=(60, 50))
    classes = [f"class{label}" for label in range(4)]
    checkpoint = write_checkpoint(tmp_path, data={"classes": classes})
    model = plain_model(checkpoint)
    paths = sorted((images / "val").rglob("*.jpg"))
    hits = [plain_probabilities(model, path).argmax() == int(path.parent.name[-1]) for path in paths]
    argv = [checkpoint, "--format", "int8", "--data-path", images, "--output", tmp_path / "out"]
    _, output = run_tool(tmp_path, "export", *argv)
    assert f"Acc@1 {100 * sum(hits) / len(hits):.3f} before and " in output, output
    assert Path(tmp_path / "out" / f"{MODEL}-int8.pt2").exists()


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory):
    """The checkpoint, what it is exported to, and a folder of images of which some lie deeper."""
    checkpoint, out, _ = exported
    images = write_images(tmp_path_factory.mktemp("images") / "images", {"train": [2, 1], "val": [2]}, size=(60, 50))
    (images / "notes.txt").write_text("no image")
    return checkpoint, out, images


def paths_of(images):
    return sorted(map(str, images.rglob("*.jpg")))


def check(predictions, model, files, classes=CLASSES):
    """Compare predictions with plain torchvision's."""
    assert [each["file"] for each in predictions] == list(map(str, files))
    for each in predictions:
        expected = plain_probabilities(model, each["file"])
        assert set(each) == {"file", "class", "probability", "top"}
        assert {"class": each["class"], "probability": each["probability"]} == each["top"][0]
        found = torch.tensor([next(t["probability"] for t in each["top"] if t["class"] == name) for name in classes])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)
        assert each["class"] == classes[int(expected.argmax())]
        assert [t["probability"] for t in each["top"]] == sorted((t["probability"] for t in each["top"]), reverse=True)


@pytest.mark.parametrize("form", ["checkpoint", "-????????.pth", ".safetensors", ".onnx", ".pt2"])
def test_each_form_predicts_as_plain_torchvision(made, tmp_path, form):
    checkpoint, out, images = made
    source = checkpoint if form == "checkpoint" else next(out.glob(f"{MODEL}{form}"))
    _, output = run_tool(tmp_path, "predict", source, images, "--json", "--batch-size", 2)
    check(json.loads(output)["images"], plain_model(checkpoint), paths_of(images))


def test_average_and_raw_weights_are_told_apart(made, tmp_path):
    checkpoint, _, images = made
    _, output = run_tool(tmp_path, "predict", checkpoint, images, "--json", "--ema")
    check(json.loads(output)["images"], plain_model(checkpoint, "model_ema"), paths_of(images))


def test_json_stands_alone_on_standard_output(made, tmp_path):
    """With the warnings of libraries, and paths that come from standard input."""
    _, out, images = made
    files = paths_of(images)[::-1]
    paths, stdout = tmp_path / "paths", tmp_path / "stdout"
    paths.write_text("\n".join(files))
    argv = [out / f"{MODEL}.pt2", "-", "--json", "--topk", 2]
    done = run_ranks(module_rank, 1, "scripts.predict", argv, (), paths, stdout, log_folder=tmp_path).check()
    predictions = json.loads(stdout.read_text())["images"]
    assert [each["file"] for each in predictions] == files
    assert [len(each["top"]) for each in predictions] == [2] * len(files)
    assert all(line.startswith(("predicting: ", "preprocessing: ")) for line in done.output.splitlines()), done.output


def predict_at_home(home, argv, stdout):
    os.environ["TORCH_HOME"] = str(home)
    tool_rank("predict", argv, stdout)


def test_published_weights_are_opened_by_name(tmp_path):
    """From torch's cache, where a file of the right name stands for the one of the network."""
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.manual_seed(1)
    model = torchvision.models.squeezenet1_1().eval()
    published = torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1
    torch.save(model.state_dict(), cache / os.path.basename(published.url))
    images = write_images(tmp_path / "images", {"val": [1]}, size=(300, 260))
    argv = ["squeezenet1_1.IMAGENET1K_V1", images, "--json", "--topk", "1000"]
    run_ranks(predict_at_home, 1, tmp_path, argv, tmp_path / "stdout", log_folder=tmp_path).check()
    [prediction] = json.loads((tmp_path / "stdout").read_text())["images"]
    image = Image.open(prediction["file"]).convert("RGB")
    with torch.no_grad():
        expected = model(published.transforms()(image)[None]).double().softmax(dim=1)[0]
    assert prediction["class"] == published.meta["categories"][int(expected.argmax())]
    assert prediction["probability"] == pytest.approx(expected.max().item(), abs=TOLERANCE)


def test_table_csv_and_page_say_the_same(made, tmp_path):
    checkpoint, _, images = made
    hostile = tmp_path / "a <b>&, 'c'.jpg"
    hostile.write_bytes((images / "val" / "class0" / "image000.jpg").read_bytes())
    files = [*paths_of(images), str(hostile)]
    _, output = run_tool(tmp_path, "predict", checkpoint, *files, "--json")
    predictions = json.loads(output)["images"]
    _, text = run_tool(tmp_path, "predict", checkpoint, *files, "--csv", "--html", tmp_path / "page.html")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["file"], int(row["rank"]), row["class"], float(row["probability"])) for row in rows] == [
        (each["file"], rank, top["class"], pytest.approx(top["probability"], abs=1e-6))
        for each in predictions
        for rank, top in enumerate(each["top"], 1)
    ]
    _, table = run_tool(tmp_path, "predict", checkpoint, *files)
    for line, each in zip(table.splitlines(), predictions, strict=True):
        assert line.startswith(each["file"])
        assert f"{100 * each['probability']:5.1f}% {each['class']}" in line
    page = (tmp_path / "page.html").read_text()
    pictures, texts = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag != "b"  # of a file's or a class's name
            pictures.extend(value for name, value in attrs if name == "src")

        def handle_data(self, text):
            texts.append(text)

    Reader().feed(page)
    assert len(pictures) == len(files)
    for source in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))))
        assert max(image.size) <= 160
    assert all(name in texts for name in files)
    assert "http" not in page.replace("http-equiv", "")


def test_classes_are_numbers_where_nothing_names_them_and_can_be_named(made, tmp_path):
    checkpoint, _, images = made
    bare = tmp_path / "bare.pth"
    torch.save(torch.load(checkpoint, weights_only=True)["model"], bare)
    _, output = run_tool(tmp_path, "predict", bare, images, "--json", "--model", MODEL)
    assert {top["class"] for each in json.loads(output)["images"] for top in each["top"]} == set("0123")
    names = tmp_path / "names.txt"
    names.write_text("w\nx\ny\nz\n")
    _, output = run_tool(tmp_path, "predict", checkpoint, images, "--json", "--classes", names)
    check(json.loads(output)["images"], plain_model(checkpoint), paths_of(images), classes="wxyz")


def test_unreadable_images_are_named_and_the_others_predicted(made, tmp_path):
    checkpoint, _, images = made
    files = paths_of(images)
    (tmp_path / "torn.jpg").write_bytes((images / "val" / "class0" / "image000.jpg").read_bytes()[:300])
    (tmp_path / "empty.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.jpg")  # which nobody writes to
    given = [files[0], tmp_path / "torn.jpg", files[1], tmp_path / "empty.png", tmp_path / "pipe.jpg"]
    outcome, output = run_tool(tmp_path, "predict", checkpoint, *given, "--json", code=1)
    check(json.loads(output)["images"], plain_model(checkpoint), files[:2])
    named = [line for line in outcome.output.splitlines() if " cannot be read: " in line]
    assert [Path(line.split(" cannot be read: ")[0]).name for line in named] == ["torn.jpg", "empty.png", "pipe.jpg"]


def test_mistakes_are_one_line(made, tmp_path):
    checkpoint, out, images = made
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    foreign = tmp_path / "foreign.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), foreign)
    for source, argv, words in [
        (tmp_path / "gone.pth", [images], "gone.pth: no such file"),
        (checkpoint, [tmp_path / "gone.jpg"], "gone.jpg: no such file or folder"),
        (checkpoint, [empty], "empty holds no images"),
        (checkpoint, [images, "--classes", tmp_path / "two.txt"], "2 names of classes were given, and the model has 4"),
        (checkpoint, [images, "--device", "meta"], "--device meta cannot be used: this machine has none"),
        (out / f"{MODEL}.onnx", [images, "--ema"], "leave out --ema"),
        (out / f"{MODEL}.onnx", [images, "--device", "cuda"], "leave out --device"),
        (tmp_path / "junk.onnx", [images], "junk.onnx cannot be opened"),
        (tmp_path / "junk.pt2", [images], "junk.pt2 cannot be opened"),
        (tmp_path / "junk.safetensors", [images], "junk.safetensors is no safetensors file"),
        (foreign, [images], "foreign.pt2 does not say how its images are prepared"),
    ]:
        outcome, output = run_tool(tmp_path, "predict", source, *argv, "--json", code=2)
        assert words in refused(outcome, "predict"), outcome.output
        assert output == ""


def test_broken_weights_predict_nothing(made, tmp_path):
    checkpoint, _, images = made
    content = torch.load(checkpoint, weights_only=True)
    content["model"]["classifier.1.bias"][0] = torch.nan
    torch.save(content, tmp_path / "nan.pth")
    argv = [tmp_path / "nan.pth", images, "--json"]
    outcome, output = run_tool(tmp_path, "predict", *argv, code=5)
    assert "nan.pth are not finite: its weights are broken" in refused(outcome, "predict")
    assert output == ""


def test_damaged_description_is_one_line(made, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    _, out, images = made
    with safetensors.safe_open(out / f"{MODEL}.safetensors", "pt") as file:
        texts, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
        safetensors.save_file(weights, path, {**texts, **change})
        outcome, _ = run_tool(tmp_path, "predict", path, images, code=2)
        assert "its description is damaged" in refused(outcome, "predict")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("vit_b_16.IMAGENET1K_SWAG_E2E_V1", 384), ("googlenet", 224)])
def test_published_models_of_their_own_input_are_built_as_published(name, size, monkeypatch):
    """A ViT of 384 px; and GoogLeNet, which rescales its inputs for published weights."""
    from checkpointing import published
    from scripts import trained

    options = {"image_size": 384} if size == 384 else {"init_weights": False, "aux_logits": True}
    model = torchvision.models.get_model(name.partition(".")[0], **options)
    monkeypatch.setattr(published, "fetch_published", lambda *_: model.state_dict())
    opened = trained.open_trained(name)
    assert opened.preset.crop_size == size
    assert getattr(opened.model, "transform_input", True)
