"""Give the weights of a file the names of timm's model, where the tensors come in the same order.

python examples/rename_weights.py efficientnet-lite0-57934424.pth tf_efficientnet_lite0 lite0.pth

Equal shapes do not prove the same meaning: look at predictions of images that you know.
"""

import sys

import timm
import torch

source, name, target = sys.argv[1:]
theirs = torch.load(source, weights_only=True)
ours = timm.create_model(name).state_dict()
renamed = dict(zip(ours, theirs.values(), strict=True))
if any(renamed[key].shape != ours[key].shape for key in ours):
    sys.exit(f"{source}: the tensors do not come in the order of {name}")
torch.save(renamed, target)
