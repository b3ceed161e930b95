"""All that the fork server imports and opens before it forks: the seconds that each rank would otherwise spend."""

# ruff: noqa: E402
import atexit
import gc
import importlib
import os

os.environ.pop("GLIBC_TUNABLES", None)  # of conftest.py, for this process
gc.disable()  # all that is imported stays, and a quarter of the time would go into looking for garbage in it

import encodings.cp437  # noqa: F401

import pytest  # noqa: F401
import timm  # noqa: F401
import torch
import torch._dynamo
import torch.utils.serialization.config
import torch.utils.tensorboard
from PIL import Image, JpegPresets  # noqa: F401
from tensorboard.backend.event_processing import event_accumulator  # noqa: F401

import train  # noqa: F401
import transforms  # noqa: F401
from bench import benchmark  # noqa: F401
from models.build import check_model
from monitoring import pictures
from scripts import check, evaluate, export, pack, predict, prepare  # noqa: F401
from settings import config
from tests import crash, faults, images, ranks, runs, started  # noqa: F401

# What stands behind doors, too, of which each rank opens some.
for name in ("checkpointing", "distributed", "loading", "metrics", "models", "monitoring", "settings"):
    for path in sorted((ranks.REPOSITORY / name).glob("[!_]*.py")):
        importlib.import_module(f"{name}.{path.stem}")
# No pool of threads may exist when processes are forked.
torch.set_num_threads(1)
# Whether the suite's models take images of their sizes: a fifth of a short run. None of it needs a thread or memory.
with torch.random.fork_rng([]):
    for options in (started.SMALL, runs.OPTIONS):
        check_model(config.parse_args([*options, "--synthetic"]))
Image.init()
pictures.draw_grid("", [Image.new("RGB", (1, 1))], [[""]])  # its font
# A collection in a rank would touch, and so copy, all that is shared with the server: a quarter of a second each.
gc.freeze()
atexit.register(gc.unfreeze)  # or Triton's binding prints a list of the objects that nobody has freed
gc.enable()
# A short run has next to no garbage of its own, and would look for it forty times.
gc.set_threshold(20_000, *gc.get_threshold()[1:])
