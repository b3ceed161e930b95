"""Load weights that were trained at another image size."""

import importlib
from collections import OrderedDict
from collections.abc import Mapping

import torchvision
from torch import Tensor, nn


def load_resized(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict, perhaps for images of another size, and print a line if it is.

    torchvision's and timm's own functions resize its position embeddings and relative position biases.

    Raises:
        RuntimeError: names or shapes are not the model's.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    words = ("pos_embed", "relative_position", "rel_pos")
    positions = [name for name in weights if name in shapes and any(word in name for word in words)]
    others = [name for name in positions if weights[name].shape != shapes[name]]
    home = importlib.import_module(type(model).__module__)
    found = weights
    if others and home.__name__.startswith("timm.") and hasattr(home, "checkpoint_filter_fn"):
        found = OrderedDict(home.checkpoint_filter_fn(dict(weights), model))
    elif others and isinstance(model, torchvision.models.VisionTransformer):
        resize = torchvision.models.vision_transformer.interpolate_embeddings
        found = resize(model.image_size, model.patch_size, OrderedDict(weights))
    if found is not weights:
        # The versions of the modules, by which they translate older state dicts.
        vars(found)["_metadata"] = getattr(weights, "_metadata", {})
    model.load_state_dict(found)
    others = [name for name in others if name in found]
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        sizes = f"{tuple(weights[others[0]].shape)} to {tuple(shapes[others[0]])}"
        print(f"{source}: trained at another image size; resized {others[0]}{more} from {sizes}")
