"""What is measured of a model's outputs, in training and in evaluation."""

import torch


def count_correct(
    output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor, topk: tuple[int, ...] = (1,)
) -> list[torch.Tensor]:
    """Count the images whose target is among the k highest scores, for each k.

    Args:
        output: (B, num_classes) scores, or a tuple that begins with them, as of a model with auxiliary classifiers.
        target: (B,) class indices, or (B, num_classes) soft targets, of which the highest counts.
        topk: each k; one above the number of classes counts as that number.

    Returns:
        A list of 0-d int64 tensors on the device; nothing is read.
    """
    with torch.inference_mode():
        output = output if isinstance(output, torch.Tensor) else output[0]
        if target.ndim == 2:
            target = target.argmax(dim=1)
        num_classes = output.size(1)
        ranked = output.topk(min(max(topk), num_classes), dim=1).indices
        hits = ranked.eq(target[:, None])
        return [hits[:, : min(k, num_classes)].sum() for k in topk]
