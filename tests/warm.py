"""What the fork server imports before it forks: the second that each rank would otherwise spend."""

import timm  # noqa: F401
import torch
import torch._dynamo
import torch.utils.tensorboard

import train  # noqa: F401

# No pool of threads may exist when processes are forked.
torch.set_num_threads(1)
