"""A run around steps of a test's own: what `train.main` builds, of a model and an optimizer that are given."""

import data
import optim
from checkpointing.preemption import PreemptionGuard
from checkpointing.store import CheckpointManager
from loading.seen import SeenRecord
from models import ShardedStep
from monitor import Monitor
from run import Run


def run_of(args, folder, model, optimizer, sampler, device, kind=Run):
    """Return a run that logs nothing, in a folder that it has not been opened in."""
    vars(args).update(
        output_dir=str(folder), batch_size=sampler.shards.batch_size, num_shards=sampler.shards.num_shards
    )
    images = data.SyntheticImages(sampler.num_images, 8)
    run = kind(
        args, None, CheckpointManager(folder), PreemptionGuard(is_installed=False), SeenRecord(args, None),
        sampler=sampler, datasets=(images, images), sharded_step=ShardedStep(model, sampler.shards, device=device),
        lr_scheduler=optim.build_lr_scheduler(args, optimizer),
        parts={"model": model, "optimizer": optim.OptimizerState(optimizer)},
    )  # fmt: skip
    run.monitor = Monitor(None, run.state)
    return run
