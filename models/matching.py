"""Load weights into a model that may have another classifier, other channels or images of another size."""

import copy
from collections.abc import Callable, Mapping

import torchvision
from torch import Tensor, nn

from errors import UserError, as_user_error, counted
from models.classifier import classifier_layers, count_classes
from models.resizing import load_resized
from settings.custom_code import parse_kwargs
from settings.options import BY_NAME, ModelOptions


def check_rescaling(model: nn.Module, weights: Mapping[str, Tensor], model_options: ModelOptions, source: str) -> None:
    """Refuse weights of GoogLeNet or Inception v3 unless their inputs were rescaled as the model rescales its own.

    torchvision rescales them for published weights, and training from these keeps it.
    """
    # Published weights have none; `build_model` knows them by their name.
    if not hasattr(weights, "options"):
        return
    options = weights.options
    kwargs = options.get("model_kwargs")
    given = {}
    if BY_NAME["model_kwargs"].is_value(kwargs):
        given = parse_kwargs(kwargs)
    if "transform_input" in given:
        found = bool(given["transform_input"])
    elif "weights" in options:
        published = torchvision.models.get_model_weights(model_options.model).__members__
        found = str(options["weights"]).rpartition(".")[2] in published
    else:
        found = options.get("pretrained")  # of torchvision's script before 0.12
    if found is None and "transform_input" not in parse_kwargs(model_options.model_kwargs):
        raise UserError(
            f"{source} does not say whether its inputs were rescaled to [-1, 1], as those of torchvision's published "
            "weights are; give train.py --model-kwargs transform_input=True or transform_input=False"
        )
    if found not in (None, model.transform_input):
        kind = "rescaled" if found else "not rescaled"
        advice = f"give --model-kwargs transform_input={found}"
        raise UserError(f"{source} was trained with inputs {kind} to [-1, 1]; {advice}")


def load_matching(
    model: nn.Module, weights: dict[str, Tensor], source: str, build: Callable[[int], nn.Module], num_classes: int, *,
    classifier_init: str | None = "zero",
) -> None:  # fmt: skip
    """Load a state dict into a model; where its classifier is missing or of other classes, a new one starts.

    A model by `build` with the state dict's number of classes loads it first, so that modules can translate older
    versions. `classifier_init` is `zero` for a new classifier of zeros, `model` for the one that the model has drawn,
    or None where no training follows: then the classifier must be for the model's `num_classes`. Messages call the
    weights `source`.

    Raises:
        UserError: the state dict belongs to another model, or its classifier does not fit.
    """
    state = model.state_dict()
    _check_not_quantized(weights, state, source)
    ends = classifier_layers(model, num_classes)
    own = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in ends}
    is_headless = not own.keys() & weights.keys()
    if is_headless and classifier_init is not None:
        weights = copy.copy(weights)  # with its notes
        weights.update(own)
    check_names(weights, {name: tensor for name, tensor in state.items() if name not in own}, source)
    theirs = count_classes(model, weights, num_classes)
    # Modules translate state dicts of older versions as they load them, but only those of their own shapes.
    reader = model if theirs == num_classes else build(theirs)
    kind = getattr(weights, "kind", "a state dict")
    with as_user_error(f"{source} belongs to another model, check --model: it holds {kind}"):
        load_resized(reader, weights, source)
    if reader is model and not is_headless:
        disorder = getattr(weights, "disorder", None)
        if disorder:
            raise UserError(f"{source}: {disorder[0]}; to continue anyway, give --allow-change data")
        return
    if classifier_init is None:
        advice = "--test-only needs data with the classes that it was trained on"
        raise UserError(f"{source} has a classifier for {theirs} classes, but the data has {num_classes}; {advice}")
    if reader is not model:
        body = {name: tensor for name, tensor in reader.state_dict().items() if name not in own}
        model.load_state_dict(body, strict=False)
    # A classifier of zeros has a first loss of ln(classes). On 300 photographs EfficientNet-Lite0 had 95.8 % after
    # four epochs from zeros, and 74.3 % from a classifier as drawn (docs/LOG.md, A new classifier).
    # SqueezeNet's convolution has a ReLU behind it, through which no gradient reaches zeros.
    is_zero = classifier_init == "zero" and all(isinstance(model.get_submodule(end), nn.Linear) for end in ends)
    if is_zero:
        for tensor in own.values():
            tensor.zero_()
    found = "no classifier" if is_headless else f"classifier of {counted(theirs, 'class')} left out"
    values = "of zeros" if is_zero else "as the model draws it"
    print(f"{source}: {found}, starting a new one of {num_classes} {values} ({', '.join(ends)})")


def _check_not_quantized(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> None:
    """Refuse integers and 8-bit floats for weights of the model, `state`: `load_state_dict` would cast them."""
    for name, tensor in state.items():
        found = weights.get(name)
        if found is None or not tensor.is_floating_point():
            continue
        if not found.is_floating_point() or found.itemsize < 2:
            raise UserError(f"{source} is quantized: {name} is {found.dtype}; give weights of 16 bits or more")


def check_names(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError for weights none of whose names are the model's, `state`."""
    if not weights.keys() & state.keys():
        found, expected = (next(iter(names), "nothing") for names in (weights, state))
        names = f"its names begin with {found}, the model's with {expected}; docs/runs.md tells how to rename tensors"
        raise UserError(f"{source} belongs to another model, check --model, or another library wrote it: {names}")
