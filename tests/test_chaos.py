"""A short round of what `make chaos` does at length: nothing lost, nothing different, nothing executed."""

import json
import shutil

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from tests.chaos import CAMPAIGNS, Chaos


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=1)


# How many faults of a kind strike; the campaigns themselves compare each run with an uninterrupted one.
ROUNDS = {
    "kills": 8, "loader_kills": 4, "rank_kills": 4, "all_rank_kills": 2, "resizes": 4, "signals": 8, "rank_signals": 3,
}  # fmt: skip


@pytest.mark.parametrize("kind", ROUNDS)
def test_faults_lose_nothing_and_change_nothing(chaos, kind):
    chaos.campaign(kind, ROUNDS[kind])
    assert chaos.problems == []
    assert chaos.counts[kind] >= ROUNDS[kind]
    assert chaos.counts["lost"] == chaos.counts["different"] == 0


def test_wrong_data_is_accepted_in_no_flipped_bit(chaos):
    chaos.bitflips(1000)
    assert chaos.problems == []


def test_the_oracle_sees_each_change(chaos, tmp_path):
    """The negative control: each of these must be counted."""
    plain = CAMPAIGNS["signals"]
    chaos.reference(plain)
    chaos.train(tmp_path / "whole", 1).check()
    shutil.copytree(tmp_path / "whole", tmp_path / "same")
    chaos.compare(tmp_path / "same", plain, "same")
    assert chaos.problems == []
    for number, change in enumerate(CHANGES, 1):
        out = tmp_path / change.__name__
        shutil.copytree(tmp_path / "whole", out)
        change(out)
        chaos.compare(out, plain, change.__name__)
        assert (chaos.counts["different"], len(chaos.problems)) == (number, number), change.__name__

    out = tmp_path / "whole"
    assert chaos.note_loss(out, 13) == 12
    assert chaos.counts["lost"] == 1
    (out / "checkpoint-00000011.pth").write_bytes(b"torn")
    chaos.note_loss(out, 12)
    assert chaos.counts["lost"] == 2


def flip_a_bit(out, name="checkpoint.pth"):
    state = torch.load(out / name, weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, out / name)


def flip_a_bit_of_the_best(out):
    flip_a_bit(out, "best.pth")


def lose_the_best_average(out):
    (out / "best_ema.pth").unlink()


def misname_a_checkpoint(out):
    (out / "checkpoint-00000012.pth").rename(out / "checkpoint-00000013.pth")


def change_a_line(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "loss": 0.5})]))


def leave_something(out):
    (out / "checkpoint.pth.tmp.7").write_bytes(b"")


def be_requeued(out):
    record = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**record, "state": "preempted", "requeue": True}))


def double_a_point(out):
    with SummaryWriter(out) as writer:
        writer.add_scalar("val/acc1", 50.0, 12)


def lose_the_points(out):
    for path in out.glob("events.*"):
        path.unlink()


def forget_an_option(out):
    text = (out / "recipe.toml").read_text()
    (out / "recipe.toml").write_text("\n".join(line for line in text.splitlines() if "label-smoothing" not in line))


CHANGES = [
    flip_a_bit, flip_a_bit_of_the_best, lose_the_best_average, misname_a_checkpoint, change_a_line, leave_something,
    be_requeued, double_a_point, lose_the_points, forget_an_option,
]  # fmt: skip
