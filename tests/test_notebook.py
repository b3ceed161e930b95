"""touchstone.py, a notebook's face: in a real kernel, that is stopped once and twice; and in a program of one's own."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

import train  # noqa: F401
from checkpointing.guard import hash_project
from errors import UserError
from tests.images import turn, write_images
from tests.ranks import REPOSITORY, run_ranks
from tests.started import SMALL, Started

SLOW = """
import pathlib, time, torch
def slow():
    def loss(output, target):
        pathlib.Path("in a step").touch()
        time.sleep(0.4)
        return torch.nn.functional.cross_entropy(output, target)
    return loss
"""
SIZES = dict.fromkeys(["train_crop_size", "val_crop_size", "val_resize_size"], 32)
SMALLER = str({"model": "shufflenet_v2_x0_5", "weights": "w.pth", "batch_size": 8, "workers": 0, **SIZES})


def press(kernel, folder, num_stops):
    """Send what a notebook's stop button sends, to the kernel's whole group, in a step after the first epoch."""
    records, sign = folder / "runs" / "slow" / "metrics.jsonl", folder / "in a step"
    while not (records.exists() and records.stat().st_size):
        time.sleep(0.01)
    sign.unlink(missing_ok=True)
    while not sign.exists():
        time.sleep(0.01)
    for _ in range(num_stops):
        os.killpg(kernel.provisioner.pid, signal.SIGINT)
        time.sleep(0.1)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """The sources of the notebook's cells, and a function that runs a cell in a kernel and returns what it shows."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    book = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(book, resources=place, kernel_name="python3", timeout=240, allow_errors=True)

    def run(source, num_stops=0):
        """Return the text, the HTML and the error; the cell is stopped so many times."""
        book.cells.append(nbformat.v4.new_code_cell(source))
        if num_stops:
            threading.Thread(target=press, args=(client.km, tmp_path, num_stops), daemon=True).start()
        outputs = client.execute_cell(book.cells[-1], len(book.cells) - 1).outputs
        shown = [{"text": each.get("text"), **each.get("data", {})} for each in outputs]
        text = "".join(each["text"] or each.get("text/plain", "") for each in shown)
        errors = ["\n".join(each["traceback"]) for each in outputs if each.output_type == "error"]
        return text, "".join(each.get("text/html", "") for each in shown), "".join(errors)

    with client.setup_kernel():
        yield [cell.source for cell in book.cells if cell.cell_type == "code"], run


def test_the_notebook_runs_shows_curves_and_one_line_and_survives_both_stops(tmp_path, notebook):
    for name, numbers in {"photos": [11, 10, 8], "new": [1, 1, 1]}.items():
        (write_images(tmp_path / "made", {name: numbers}) / name).rename(tmp_path / name)
    (tmp_path / "slow.py").write_text(SLOW)
    torch.save(torchvision.models.shufflenet_v2_x0_5().state_dict(), tmp_path / "w.pth")
    (cells, run), shown = notebook, []
    for source in cells:
        source = source.replace("%pip", "# %pip").replace("epochs=30", "epochs=3").replace("data/", "")
        source = source.replace('{"model": "resnet50", "weights": "IMAGENET1K_V2"}', SMALLER)
        source = source.replace('"resnet50.IMAGENET1K_V2"', '"w.pth", model="shufflenet_v2_x0_5"')
        text, html, error = run(source.replace("NEW.iterdir()", 'NEW.glob("*/*")'))
        assert error == "", error
        shown.append((text, html))
    text, html = shown[2]
    assert html.count("<img") == 2  # Acc@1 and loss, drawn in place
    assert "eta: " not in text
    assert "photos has no train/ and is taken as it: the classes are its folders, class0, class1, class2\n" in text
    assert "finished run in runs/photos, best: {'kind': 'minival'" in text
    assert ("% right, from " in shown[5][0], shown[5][0].count("image000.jpg class")) == (True, 3)

    mistakes = {"epoch=3": "--epoch is unknown; did you mean --epochs?", "data_path='no'": "--data-path no is no"}
    for source, words in mistakes.items():
        *_, error = run(f"kept = 42; fit_photos({source})")
        assert error.startswith(f"error: {words}"), error
        assert "\n" not in error
    slow = "run = fit_photos(epochs=3, output_dir='runs/slow', criterion='slow.py:slow'); print(run)"
    models = "import gc; gc.collect(); print(sum(type(o) is type(model.model) for o in gc.get_objects()))"
    before = run(models)
    text, *_ = run(slow, num_stops=1)
    assert "SIGINT: the run stopped after step" in text
    assert "preempted run in runs/slow, best: {'kind': 'minival'" in text
    *_, error = run(slow, num_stops=2)
    assert error.endswith('resume="auto" continues from the last checkpoint')
    assert run(models) == before  # the error that the notebook keeps does not keep the model
    assert run("print(kept, run.state)")[0] == "42 preempted\n"
    text, *_ = run(slow)
    assert "resumed step " in text
    assert "finished run in runs/slow, best: {'kind': 'minival'" in text


def program(folder, images):
    source = hash_project(REPOSITORY)
    from touchstone import Fitted, fit

    assert hash_project(REPOSITORY) == source  # by which a run is told that its code has changed
    sys.argv = ["demo.py", "--of-my-own"]
    options = {word[2:].replace("-", "_"): value for word, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
    options |= {"data_path": images, "output_dir": folder / "a", "epochs": 2, "mean": [0.5, 0.5, 0.5], "std": None}
    options |= {"augment": False, "model_ema": True, "batch_size": 8}
    assert fit(**options, stop_epoch=1).state == "stopped"
    run = fit(**options, resume="auto")
    assert run.records() == Fitted(str(folder / "a")).records()
    assert (run.state, run.best.name, run.result["kind"]) == ("finished", "best.pth", "val")
    state = torch.load(run.best, weights_only=True)
    assert (state["best"]["value"], state["best"]["step"]) == (run.result["acc1"], run.result["step"])
    assert (state["args"]["augment"], state["args"]["mean"], state["args"]["epochs"]) == (False, [0.5] * 3, 2)
    for wrong in {"test_only": True, "resume": str(run.best)}, {"dry_run": True}, {"list_recipes": ""}:
        with pytest.raises(UserError, match="fit only trains"):
            fit(**{**options, **wrong})


def test_a_program_of_ones_own_is_told_of_train_py(image_folder, tmp_path):
    output = run_ranks(program, 1, tmp_path, image_folder, log_folder=tmp_path).check().output
    assert f"evaluate  python train.py --test-only --resume {tmp_path}/a/best.pth" in output
    assert output.count("  eta: ") > 4


def test_predictions_and_features_are_those_of_a_loop_of_ones_own(tmp_path):
    from touchstone import open_trained

    images = write_images(tmp_path / "images", {"train": [11, 10, 8], "val": [3, 2, 2]})
    model = open_trained(Started(images, tmp_path).out / "best.pth")
    files = sorted((images / "val").rglob("*.jpg"))
    steps = [v2.Resize(32), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    preset = v2.Compose([*steps, v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    with torch.inference_mode():
        logits = model.model(torch.stack([preset(Image.open(file)) for file in files]))
    arrays = [numpy.array(Image.open(file)) for file in files]
    for images in (files, [*map(str, files)], map(Image.open, files), arrays):
        classes, shares = model.predict(images)
        assert classes == [f"class{label}" for label in logits.argmax(1)]
        numpy.testing.assert_allclose(shares, logits.double().softmax(1).numpy(), atol=1e-6)
    features, head = torch.from_numpy(model.features(files)).float(), model.model.fc
    torch.testing.assert_close(features @ head.weight.T + head.bias, logits, rtol=1e-4, atol=1e-5)
    turn(files[0], 6)
    for one in (files[0], Image.open(files[0])):
        assert (model.predict(one)[1] == model.predict(str(files[0]))[1]).all()
    assert model.predict(arrays[0])[1].shape == (1, 3)
    files[0].write_bytes(b"no image")
    grey = Image.fromarray(numpy.zeros((40, 40), numpy.int32))
    wrong = {"no images": [], "image000.jpg cannot be read": files, "ndarray cannot": numpy.zeros((3, 40, 40))}
    wrong |= {"no fixed white": grey, "gone.jpg cannot": Path("gone.jpg"), "NoneType cannot": [None]}
    for words, images in wrong.items():
        with pytest.raises(UserError, match=words):
            model.predict(images)
