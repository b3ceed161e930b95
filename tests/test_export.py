"""scripts/export.py: every form holds the checkpoint's model, by the readers of others."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from tests.exports import CLASSES, MODEL, plain_model, plain_probabilities, refused, run_tool, write_checkpoint
from tests.images import write_images
from tests.ranks import run_ranks

# Of a logit; those of the model are about 3 (kernels sum in other orders).
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


def test_the_record_beside_the_files_has_their_hashes(exported):
    record = json.loads((exported[1] / f"{MODEL}.json").read_text())
    assert len(record["files"]) == 5
    for name, facts in record["files"].items():
        assert facts["sha256"] == hashlib.sha256((exported[1] / name).read_bytes()).hexdigest()


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


def test_killed_at_any_point_it_leaves_whole_files_and_goes_on(exported, tmp_path):
    checkpoint, out, _ = exported
    argv = [checkpoint, "--format", "weights,safetensors", "--output", tmp_path / "out"]
    for call in (2, 4):  # two files with a record before each
        run_tool(tmp_path, "export", *argv, fault=("os.replace", call, "before"), code=-9)
        for path in (tmp_path / "out").glob("*"):
            if ".tmp." not in path.name and path.suffix in (".pth", ".safetensors"):
                assert path.read_bytes() == (out / path.name).read_bytes()
            if path.suffix == ".json":
                json.loads(path.read_text())
    run_tool(tmp_path, "export", *argv)
    written = {path.name for path in (tmp_path / "out").iterdir() if ".tmp." not in path.name}
    assert written >= {next(out.glob("*.pth")).name, f"{MODEL}.safetensors", f"{MODEL}.json"}


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
