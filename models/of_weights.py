"""The model that weights belong to, as their own options or what is published about them say."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import nn

from checkpointing.first_weights import add_published_options
from checkpointing.preprocessing import choose_preprocessing
from checkpointing.weights import Weights
from errors import as_user_error, one_line
from models.build import build_model, check_name
from models.classifier import count_classes
from settings import config
from settings.options import BY_NAME
from settings.stages import Parsed


def build_evaluated(
    source: str, name: str, weights: Weights, given: Mapping[str, Any], *, is_typed: bool = False
) -> tuple[nn.Module, Parsed, str]:
    """Return a trained model in evaluation mode on the CPU, its options, and where its preprocessing comes from.

    Args:
        source: the name of the weights in a message.
        name: the model's name.
        weights: the weights, with the options that they were trained or published with.
        given: preprocessing in place of the weights' own.
        is_typed: the command line names the model, so its own file may be run.
    """
    check_name(name)
    add_published_options(weights, name)
    # Those of another script may have other values than ours.
    known = {key: value for key, value in weights.options.items() if key in BY_NAME}
    options = {key: value for key, value in known.items() if value is None or BY_NAME[key].is_value(value)}
    typed = ["model"] if is_typed else []
    in_chans = options.get("in_chans")
    if not in_chans:
        # Weights that do not tell their channels have as many as there are values for each.
        in_chans = len(options.get("mean") or given.get("mean") or config.IMAGENET_MEAN)
        if not BY_NAME["in_chans"].is_value(in_chans):
            in_chans = 3
    chosen = Namespace(model=name, test_only=True, resume=one_line(source), synthetic=1, in_chans=in_chans, **given)
    with as_user_error(source):
        args, _ = config.as_trained(config.resolve(chosen, typed=typed), options)
    args, origin = choose_preprocessing(args, source, weights.options, weights.origin)
    if isinstance(options.get("weights"), str):  # GoogLeNet and Inception rescale inputs for published ones
        args = args.replaced(weights=options["weights"])
    args = args.replaced(is_launched=False)
    num_classes = len(weights.classes) if weights.classes else count_classes(build_model(args, 1000), weights, 1000)
    return build_model(args, num_classes, weights, source).eval().requires_grad_(False), args, origin
