"""The weights of a checkpoint that is evaluated, and their average."""

from torch import nn

from errors import as_user_error
from models.build import compile_model
from models.resizing import load_resized
from settings.stages import Resolved


def load_evaluated(args: Resolved, model: nn.Module, state: dict | None) -> nn.Module | None:
    """Load the weights of a checkpoint to evaluate, if there is one, and return the average that it holds, if any.

    Position embeddings and biases are resized to the images, like those of `--weights`; UserError if anything misfits.
    """
    if state is None:
        return None
    source = f"--resume {args.checkpoint.resume}"
    misfit = f"does not fit --model {args.model.model}"
    with as_user_error(f"the checkpoint of {source} {misfit}"):
        load_resized(model, state["model"], source)
    if "model_ema" not in state:
        return None
    from models.ema import ExponentialMovingAverage

    # No update follows, so that the decay does not matter.
    model_ema = ExponentialMovingAverage(model, decay=0.0, device=None)
    averaged = {name.removeprefix("module."): each for name, each in state["model_ema"].items() if name != "n_averaged"}
    with as_user_error(f"the average in the checkpoint of {source} {misfit}"):
        load_resized(model_ema.module, averaged, f"the average of {source}")
    compile_model(model_ema.module, args.precision, args.augmentation)
    return model_ema
