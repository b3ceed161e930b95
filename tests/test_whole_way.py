"""docs/tools.md: its own commands lead from raw archives to predictions with every exported file."""

import json
import os
import re
import shlex
import shutil

import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from tests import archives
from tests.ranks import REPOSITORY, module_rank, run_ranks

PAGE = (REPOSITORY / "docs" / "tools.md").read_text()
# What a miniature needs in place of the page's words: a small model, few processes, and other sizes.
SMALL = """
    --model resnet18 --device cpu --workers 0 --batch-size 4 --epochs 3 --lr 0.01 --train-crop-size 32
    --val-resize-size 40 --val-crop-size 32
"""
WORDS = {
    "--recipe resnet50-v2": " ".join(SMALL.split()), "resnet50": "resnet18", "--nproc_per_node=8": "--nproc_per_node=2",
    "prepare downloads": "prepare --skip-md5 downloads",
    "check data/imagenet": "check data/imagenet --expect-train any --expect-val any --expect-classes any",
}  # fmt: skip


def run(folder, words, stdout=None):
    launcher, *words = words
    world_size = 1
    if launcher == "torchrun":
        world_size, words = int(words[0].removeprefix("--nproc_per_node=")), words[1:]
    module, *argv = words[1:] if words[0] == "-m" else [words[0].removesuffix(".py"), *words[1:]]
    ranks = run_ranks(module_rank, world_size, module, argv, (os.chdir, folder), None, stdout, log_folder=folder)
    return ranks.check().output


def write_sets(folder):
    """Write ImageNetV2's form (numbered folders) and ImageNet-R's (some classes), of images of val."""
    images = [(name.split("/")[1:], content) for name, content in archives.tree().items() if name.startswith("val/")]
    classes = sorted({synset for (synset, _), _ in images})
    for (synset, file), content in images:
        for path in [f"imagenetv2/{classes.index(synset)}"] + [f"imagenet-r/{synset}"] * (synset in classes[:3]):
            (folder / "data" / path).mkdir(parents=True, exist_ok=True)
            (folder / "data" / path / file).write_bytes(content)
    return classes


def plain_scores(folder, paths):
    state = torch.load(folder / "final.pth", weights_only=True)
    model = torchvision.models.resnet18(num_classes=len(state["data"]["classes"])).eval()
    model.load_state_dict(state["model"])
    prepare = transforms.Compose([
        transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    with torch.inference_mode():
        return model(torch.stack([prepare(Image.open(path).convert("RGB")) for path in paths]))


@pytest.mark.dist
def test_from_archives_to_predictions(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime", "safetensors"):
        pytest.importorskip(package)
    archives.write_official(tmp_path / "downloads")
    classes = write_sets(tmp_path)
    block = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]
    for page, ours in WORDS.items():
        assert page in block
        block = block.replace(page, ours)
    *steps, predict = map(shlex.split, block.splitlines())
    said = {words[words.index("-m") + 1] if "-m" in words else "train": run(tmp_path, words) for words in steps}
    assert "minival" in said["train"]
    assert len(list((tmp_path / "runs/resnet18").glob("checkpoint-*.pth"))) == 3

    val = sorted((tmp_path / "data/imagenet/val").rglob("*.JPEG"))
    scores = plain_scores(tmp_path, val)
    truth = torch.tensor([classes.index(path.parent.name) for path in val])
    found = json.loads((tmp_path / "results.json").read_text())["sets"]
    hits = scores.argmax(1) == truth
    some = truth < 3
    expected = {"val": hits, "v2": hits, "r": scores[some, :3].argmax(1) == truth[some]}
    assert {name: found[name]["acc1"] for name in found} == {
        name: pytest.approx(100 * hits.double().mean().item()) for name, hits in expected.items()
    }
    (tmp_path / "photos").mkdir()
    photos = sorted(shutil.copy(path, tmp_path / "photos") for path in val[:3])
    probabilities = plain_scores(tmp_path, photos).softmax(1)
    exported = [path for path in sorted((tmp_path / "published").iterdir()) if path.suffix != ".json"]
    assert {path.suffix for path in exported} == {".pth", ".safetensors", ".onnx", ".pt2"}
    assert predict[3] == "published/resnet18.onnx"
    for path in exported:
        stdout = tmp_path / f"{path.name}.json"
        run(tmp_path, [*predict[:3], str(path.relative_to(tmp_path)), *predict[4:]], stdout)
        for image, expected in zip(json.loads(stdout.read_text())["images"], probabilities, strict=True):
            assert image["class"] == classes[expected.argmax()]
            found = {row["class"]: row["probability"] for row in image["top"]}
            assert found == {name: pytest.approx(expected[classes.index(name)].item(), abs=1e-5) for name in found}
            assert len(found) == 5


def test_the_page_names_every_tool_and_no_other():
    tools = {path.stem for path in (REPOSITORY / "scripts").glob("*.py") if "__main__" in path.read_text()}
    named = set(re.findall(r"scripts\.([a-z]\w+)", PAGE))
    assert named <= tools
    assert {"prepare", "check", "evaluate", "average", "export", "predict"} <= named
