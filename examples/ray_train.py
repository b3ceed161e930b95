"""train.py under Ray Train (`pip install 'ray[train]'`), with its options; this file has to lie beside train.py."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import train
from settings.config import read_command_line

args = read_command_line()  # a mistake ends it here


def train_loop() -> None:
    """Train on one of Ray's workers, in the process group that it has made."""
    train.main(args)


TorchTrainer(
    train_loop,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=args.distributed.device != "cpu"),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
