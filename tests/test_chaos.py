"""A short round of what `make chaos` does at length: nothing lost, nothing different."""

import json
import shutil

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from tests.chaos import CAMPAIGNS, Chaos
from tests.ranks import some_slow


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=1)


# How many faults of a kind strike; the campaigns themselves compare each run with an uninterrupted one.
ROUNDS = {"kills": 2, "resizes": 1, "signals": 2, "bitflips": 500}


@pytest.mark.parametrize("kind", some_slow({**CAMPAIGNS, **ROUNDS}, CAMPAIGNS.keys() - ROUNDS))
def test_faults_lose_nothing_and_change_nothing(chaos, kind):
    number = ROUNDS.get(kind, 1)
    chaos.run(kind, number)
    assert chaos.problems == []
    assert chaos.counts[kind] >= number


def flip_a_bit(out, name="checkpoint.pth"):
    state = torch.load(out / name, weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, out / name)


def change_a_line(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "loss": 0.5})]))


def be_requeued(out):
    record = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**record, "state": "preempted", "requeue": True}))


def double_a_point(out):
    with SummaryWriter(out) as writer:
        writer.add_scalar("val/acc1", 50.0, 12)


def forget_an_option(out):
    text = (out / "recipe.toml").read_text()
    (out / "recipe.toml").write_text("\n".join(line for line in text.splitlines() if "label-smoothing" not in line))


CHANGES = {
    "a flipped bit": flip_a_bit,
    "a flipped bit of the best": lambda out: flip_a_bit(out, "best.pth"),
    "no best average": lambda out: (out / "best_ema.pth").unlink(),
    "a wrong name": lambda out: (out / "checkpoint-00000012.pth").rename(out / "checkpoint-00000013.pth"),
    "a changed line": change_a_line,
    "a file left over": lambda out: (out / "checkpoint.pth.tmp.7").touch(),
    "a wrong state": be_requeued,
    "a doubled point": double_a_point,
    "no points": lambda out: [path.unlink() for path in out.glob("events.*")],
    "a lost option": forget_an_option,
}


def test_the_oracle_sees_each_change(tmp_path):
    """The negative control: each of these must be counted."""
    chaos, plain = Chaos(tmp_path, seed=1), CAMPAIGNS["signals"]
    chaos.reference(plain)
    chaos.runs.run("whole", 1).check()
    for number, (what, change) in enumerate({"nothing": lambda out: None, **CHANGES}.items()):
        shutil.copytree(tmp_path / "runs" / "whole", chaos.out)
        change(chaos.out)
        chaos.compare(plain, what)
        assert chaos.counts["different"] == number, what
    shutil.copytree(tmp_path / "runs" / "whole", chaos.out)
    assert chaos.note_loss(13) == 12
    assert chaos.counts["lost"] == 1
    (chaos.out / "checkpoint-00000011.pth").write_bytes(b"cut")
    chaos.note_loss(12)
    assert chaos.counts["lost"] == 2
