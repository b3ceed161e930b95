"""scripts/predict.py: what plain torchvision computes, from every form of a model, in every form of output."""

import base64
import csv
import io
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

from tests.exports import CLASSES, MODEL, plain_model, plain_probabilities, refused, run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import module_rank, run_ranks, tool_rank

# Of a probability: logits within 1e-4, of graphs; the same kernels in other batches, of weights.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, what it is exported to, and a folder of images of which some lie deeper."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint = write_checkpoint(folder)
    forms = "weights,safetensors,onnx,torch-export"
    run_tool(folder, "export", checkpoint, "--format", forms, "--output", folder / "out")
    images = write_images(folder / "images", {"train": [2, 1], "val": [2]}, size=(60, 50))
    (images / "notes.txt").write_text("no image")
    return checkpoint, folder / "out", images


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
        (out / f"{MODEL}.onnx", [images, "--device", "cuda"], "leave out --device cuda"),
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
def test_quantized_graphs_predict(made, tmp_path):
    checkpoint, _, images = made
    argv = ["--format", "int8", "--calibration", images, "--output", tmp_path / "out"]
    run_tool(tmp_path, "export", checkpoint, *argv)
    source = next((tmp_path / "out").glob("*.pt2"))
    _, output = run_tool(tmp_path, "predict", source, images, "--json")
    for each in json.loads(output)["images"]:  # of int8 the likeliest class, or one that is nearly as likely
        expected = plain_probabilities(plain_model(checkpoint), each["file"])
        assert expected[CLASSES.index(each["class"])] > expected.max() - 0.1


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
