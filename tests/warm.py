"""What the fork server imports before it forks: the seconds that each rank would otherwise spend."""

import gc

import pytest  # noqa: F401
import timm  # noqa: F401
import torch
import torch._dynamo
import torch.utils.tensorboard
from tensorboard.backend.event_processing import event_accumulator  # noqa: F401

import train  # noqa: F401

# No pool of threads may exist when processes are forked.
torch.set_num_threads(1)
# A collection in a rank would touch, and so copy, all that is shared with the server: a quarter of a second each.
gc.collect()
gc.freeze()
