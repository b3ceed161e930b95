"""A short round of what `make chaos` does at length: nothing lost, nothing different, nothing executed."""

import pytest

from tests.chaos import SAVE_POINTS, Chaos


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("chaos"), seed=1)


# How many faults of a kind strike; the campaigns themselves hold each run against an uninterrupted one.
ROUNDS = {
    "kills": ("kills", 12),
    "save_kills": ("save_kills", len(SAVE_POINTS)),
    "rank_kills": ("rank_kills", 4, 2),
    "signals": ("signals", 8, 3),
    "resizes": ("resizes", 4),
    "bitflips": ("bitflips", 300),
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_faults_lose_nothing_and_change_nothing(chaos, kind):
    name, *numbers = ROUNDS[kind]
    getattr(chaos, name)(*numbers)
    assert chaos.problems == []
    assert chaos.counts[kind] >= sum(numbers)
    assert chaos.counts["lost"] == chaos.counts["different"] == 0


def test_hostile_files_are_refused_and_nothing_in_them_runs(chaos):
    chaos.hostile()
    assert chaos.problems == []
    assert chaos.counts["executed"] == 0


def test_the_oracle_sees_a_changed_bit_a_lost_line_and_what_is_left_over(chaos, tmp_path):
    """The negative control: each of these must be counted."""
    import json

    import torch

    chaos.reference(1, 4)

    def run(name):
        chaos.train(tmp_path / name, 1).check()
        return tmp_path / name

    out = run("bit")
    state = torch.load(out / "checkpoint.pth", weights_only=True)
    next(iter(state["model"].values())).view(torch.int32).flatten()[0] ^= 1
    torch.save(state, out / "checkpoint.pth")
    chaos.compare(out, 4, "bit")
    assert (chaos.counts["different"], len(chaos.problems)) == (1, 1)

    out = run("line")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "loss": 0.5})]))
    chaos.compare(out, 4, "line")
    assert chaos.counts["different"] == 2

    out = run("left over")
    (out / "checkpoint.pth.tmp.7").write_bytes(b"")
    chaos.compare(out, 4, "left over")
    assert chaos.counts["different"] == 3

    out = run("back")
    assert chaos.note_loss(out, 13) == 12
    assert chaos.counts["lost"] == 1
    (out / "checkpoint-00000011.pth").write_bytes(b"torn")
    chaos.note_loss(out, 12)
    assert chaos.counts["lost"] == 2
