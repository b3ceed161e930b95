"""The classifier of a model: the layers that give the class scores."""

from collections.abc import Mapping

from torch import Tensor, nn

from errors import UserError


def classifier_layers(model: nn.Module, num_classes: int) -> list[str]:
    """Return the names of the layers that give the class scores; UserError if there are none.

    timm's models know their one or two heads. In other models these are the last layer, and the last one of each
    auxiliary classifier.
    """
    kinds = nn.Linear | nn.Conv2d
    sizes = {name: len(layer.weight) for name, layer in model.named_modules() if isinstance(layer, kinds)}
    find_heads = getattr(model, "get_classifier", None)
    # By the last layer alone --freeze trained only one of the two heads that some of timm's models have.
    if find_heads is not None:
        found = find_heads()
        heads = found if isinstance(found, tuple | list | nn.ModuleList) else [found]
        inside = {id(module) for head in heads for module in head.modules()}
        lasts = [name for name in sizes if id(model.get_submodule(name)) in inside]
    else:
        # The last layer of each part overwrites those before it: of every auxiliary classifier, and of the rest.
        parts = {name.split(".")[0] if "aux" in name.lower() else "": name for name in sizes}
        lasts = [name for name in sizes if name in parts.values()]
    ends = [name for name in lasts if sizes[name] == num_classes]
    if not ends:
        raise UserError(f"the model {type(model).__name__} has no final layer with {num_classes} outputs")
    return ends


def count_classes(model: nn.Module, weights: Mapping[str, Tensor], num_classes: int) -> int:
    """Return the number of classes of a state dict's classifier; `num_classes`, the model's, if it has none."""
    # Of several, the last one is the main one: torchvision's models register auxiliary classifiers before it.
    head = weights.get(f"{classifier_layers(model, num_classes)[-1]}.weight")
    if head is None or not head.ndim:
        return num_classes
    return len(head)
