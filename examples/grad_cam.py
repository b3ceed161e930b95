"""Where a model looks: Grad-CAM (arXiv 1610.02391) of a checkpoint.

From your own script, in the checkout's folder or with it in PYTHONPATH:

    from examples.grad_cam import heat_map
    heat = heat_map("runs/a/best.pth", "photo.jpg", "layer4")
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from loading.decode import decode_plainly
from scripts.trained import open_trained


def heat_map(checkpoint: str, photograph: str | Path, layer: str) -> Tensor:
    """Return what the predicted class owes to each place of a photograph.

    Args:
        checkpoint: what `open_trained` opens, with its preprocessing.
        photograph: an image's file.
        layer: the last module with height and width, such as layer4 of a ResNet; `print(trained.model)` names all.

    Returns:
        (H, W) from 0 to 1, at the size of the model's input.
    """
    trained, kept = open_trained(checkpoint), []
    hook = lambda module, inputs, output: kept.append(output.requires_grad_())  # noqa: E731
    trained.model.get_submodule(layer).register_forward_hook(hook)
    image = decode_plainly(Path(photograph).read_bytes(), how=trained.preset.decoding)
    score = trained.model(trained.preset(image)[None]).max()  # of the class that it predicts
    weights = torch.autograd.grad(score, kept[0])[0].mean((2, 3), keepdim=True)
    heat = (weights * kept[0].detach()).sum(1, keepdim=True).relu()
    heat = F.interpolate(heat, size=(trained.args.augmentation.val_crop_size,) * 2, mode="bilinear")[0, 0]
    return heat / heat.max().clamp(min=1e-12)
