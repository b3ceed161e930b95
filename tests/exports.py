"""A checkpoint of a small model, what plain torchvision makes of it, and the export and prediction tools run on it."""

from pathlib import Path

import torch
import torchvision
from PIL import Image
from torchvision import transforms

from tests.ranks import Outcome, run_ranks, tool_rank

MODEL = "squeezenet1_1"
CLASSES = ['a "quoted" name', "class\\1", "<b>\u00e9</b>", "d"]
SIZES = {"val_resize_size": 40, "val_crop_size": 32, "train_crop_size": 32, "interpolation": "bicubic"}


def small_model(seed: int) -> torch.nn.Module:
    """Return a model whose logits differ between images."""
    torch.manual_seed(seed)
    model = torchvision.models.get_model(MODEL, num_classes=len(CLASSES))
    torch.nn.init.normal_(model.classifier[1].weight, std=0.1)
    return model.eval()


def write_checkpoint(folder: Path, name: str = "checkpoint.pth", seed: int = 0, **more) -> Path:
    average = {f"module.{key}": tensor for key, tensor in small_model(seed + 1).state_dict().items()}
    content = {
        "model": small_model(seed).state_dict(),
        "model_ema": {**average, "n_averaged": torch.tensor(3)},
        "args": {"model": MODEL, "weights": "IMAGENET1K_V1", "data_path": "/home/somebody/secret", **SIZES},
        "data": {"classes": CLASSES, "num_images": 29, "fingerprint": "0123456789abcdef", "val": {"num_images": 400}},
        "step": 30,
        **more,
    }
    torch.save(content, folder / name)
    return folder / name


def plain_model(checkpoint: Path, key: str = "model") -> torch.nn.Module:
    model, weights = small_model(0), torch.load(checkpoint, weights_only=True)[key]
    weights = {name.removeprefix("module."): tensor for name, tensor in weights.items() if name != "n_averaged"}
    model.load_state_dict(weights)
    return model.eval()


def plain_probabilities(model: torch.nn.Module, path: Path) -> torch.Tensor:
    bicubic = transforms.InterpolationMode.BICUBIC
    steps = [
        transforms.Resize(40, bicubic, antialias=True), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]  # fmt: skip
    with torch.no_grad():
        image = transforms.Compose(steps)(Image.open(path).convert("RGB"))
        return model(image[None]).double().softmax(dim=1)[0]


def run_tool(tmp_path: Path, name: str, *argv, fault=None, largest_file=None, code=0) -> tuple[Outcome, str]:
    """Run a tool in a process of its own; return what became of it, with its standard error, and its output."""
    stdout = tmp_path / "stdout"
    outcome = run_ranks(tool_rank, 1, name, argv, stdout, fault, largest_file, log_folder=tmp_path, timeout_s=300)
    assert (outcome.codes, "Traceback" in outcome.output) == ([code], False), outcome.output
    return outcome, stdout.read_text()


def refused(outcome: Outcome, name: str, code: int = 2) -> str:
    assert (outcome.codes, "Traceback" in outcome.output) == ([code], False), outcome.output
    command = name if "." in name else f"scripts.{name}"
    lines = [line for line in outcome.output.splitlines() if f"python -m {command}: error: " in line]
    assert len(lines) == 1, outcome.output
    return lines[0]
