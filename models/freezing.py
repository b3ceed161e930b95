"""Layers that do not train: in the whole run by `--freeze` and `--freeze-below`, at first by `--freeze-epochs`."""

import re
from collections.abc import Collection, Sequence

from torch import Tensor, nn

from errors import UserError
from models.classifier import classifier_layers


def freeze_below_classifier(model: nn.Module, num_classes: int) -> None:
    """Freeze all parameters but those of the classifier; UserError if there is none of `num_classes`."""
    ends = classifier_layers(model, num_classes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] in ends)


def freeze_below(model: nn.Module, layer: str) -> None:
    """Freeze all parameters before those of a layer, in their order; UserError if it has none, or none before it."""
    names = [name for name, _ in model.named_parameters()]
    first = next((index for index, name in enumerate(names) if f"{name}.".startswith(f"{layer}.")), 0)
    if not first:
        layers = {}  # as an ordered set
        for name in names:
            # Of numbered layers the outermost, such as layer1 and encoder.layers.encoder_layer_0.
            numbered = re.match(r".*?\d(?=\.)", name)
            layers[numbered[0] if numbered else name.rpartition(".")[0]] = None
        known = ", ".join(filter(None, layers))
        raise UserError(
            f"--freeze-below {layer}: expected a layer with others before it; there are {known}, and their sublayers"
        )
    for parameter in list(model.parameters())[:first]:
        parameter.requires_grad_(False)


def freeze_batchnorm(model: nn.Module) -> None:
    """Freeze all BatchNorm layers: their factors get no gradient, and `set_training_mode` keeps their statistics."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        raise UserError("--freeze-batchnorm: the model has no BatchNorm; remove it")
    for layer in layers:
        layer.requires_grad_(False)
        vars(layer)["keeps_statistics"] = True


def set_training_mode(model: nn.Module, frozen: Collection[nn.Parameter] = ()) -> None:
    """Switch a model to training mode, but leave modules whose parameters are all frozen in evaluation mode.

    BatchNorm would otherwise keep updating its statistics there, and dropout would blur frozen features. `frozen` are
    parameters beside those that need no gradient.
    """
    model.train()
    kept = [module for module in model.modules() if getattr(module, "keeps_statistics", False)]
    apart = {parameter for module in kept for parameter in module.parameters()}
    for module in kept:
        module.eval()
    for module in model.modules():
        parameters = [parameter for parameter in module.parameters() if parameter not in apart]
        if parameters and not any(each.requires_grad and each not in frozen for each in parameters):
            module.eval()


class ClassifierFirst:
    """The epochs of `--freeze-epochs`, in which only the classifier trains.

    The layers below it get no gradients, so that the optimizer leaves them and their moments alone, and are in
    evaluation mode. In one process the backward pass ends at the classifier; DDP, which waits for every gradient,
    computes all of them, and they are dropped.

    Args:
        model: the model without DDP.
        ends: names of its classifier's layers.
        num_epochs: how many epochs these are.
        is_ddp: whether DDP wraps the model.
    """

    def __init__(self, model: nn.Module, ends: Sequence[str], num_epochs: int, *, is_ddp: bool) -> None:
        self.num_epochs = num_epochs
        self.is_on = False
        classifier = [model.get_submodule(name) for name in ends]
        own = {parameter for layer in classifier for parameter in layer.parameters()}
        self.others = {each for each in model.parameters() if each.requires_grad and each not in own}
        if num_epochs and not is_ddp:
            for layer in classifier:
                layer.register_forward_pre_hook(self._cut)

    def _cut(self, _: nn.Module, inputs: tuple) -> tuple:
        return tuple(each.detach() if self.is_on and isinstance(each, Tensor) else each for each in inputs)

    def begin(self, model: nn.Module, epoch: int) -> None:
        """Switch the model to the training mode of an epoch."""
        self.is_on = epoch < self.num_epochs
        set_training_mode(model, self.others if self.is_on else ())

    def drop_gradients(self) -> None:
        """Drop the gradients of the layers that do not train in this epoch."""
        if self.is_on:
            for parameter in self.others:
                # Not zeros, with which momentum and weight decay would still move the weights.
                parameter.grad = None
