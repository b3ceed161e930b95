"""docs/extending.md: each example is run, and own code gives the bits of the library's own where it does the same."""

import re

import pytest
import torch

import config
from checkpointing.archive import load_checkpoint
from custom import code
from tests.ranks import REPOSITORY
from tests.started import refused, run_train
from tests.test_resume import check_same_weights

SAME = """
import torch
from torch import nn

def sgd(parameters, lr, weight_decay, momentum):
    return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, foreach=True)

class Smooth(nn.Module):
    def forward(self, output, target):
        log = output.log_softmax(1)
        return (-0.9 * log.gather(1, target[:, None])[:, 0] - 0.1 * log.mean(1)).mean()

def smooth():
    return Smooth()

def no_loss():
    return 3

def no_optimizer(parameters, lr, weight_decay):
    return [lr]

def needs_more(parameters, lr, weight_decay, rho):
    return None
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SAME)
    return tmp_path / "mine.py"


def go_on(started, tmp_path, out, *argv):
    """Train the second epoch of the finished run again."""
    argv = ["--epochs", 2, "--resume", started.out / "checkpoint-00000003.pth", *argv]
    return started.go_on(tmp_path, tmp_path / out, *argv)


def test_every_example_of_the_page_trains_is_killed_and_resumes(started, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), flags=re.S)
    assert len(blocks) == 3
    mine = tmp_path / "mine.py"
    mine.write_text("\n".join(blocks))
    own = ["--model", f"{mine}:net", "--opt", f"{mine}:signs", "--criterion", f"{mine}:focal", "--lr", "0.01"]
    started.go_on(tmp_path, tmp_path / "whole", *own).check()
    kill = [(0, "torch.optim.Optimizer.zero_grad", 5, "before")]
    assert started.go_on(tmp_path, tmp_path / "killed", *own, faults=kill).codes != [0]
    started.go_on(tmp_path, tmp_path / "killed", *own, "--resume", "auto").check()
    found, _ = check_same_weights(tmp_path / "killed", tmp_path / "whole", "model", "optimizer")
    assert re.fullmatch("model [0-9a-f]{16}, opt [0-9a-f]{16}, criterion [0-9a-f]{16}", found["args"]["code"])
    assert found["args"]["code"] in (tmp_path / "killed" / "recipe.toml").read_text()


def test_a_file_of_several_options_is_run_once(mine):
    mine.write_text(SAME + "\nopen(__file__ + '.ran', 'a').write('x')\n")
    args = config.parse_args(["--synthetic", "--opt", f"{mine}:sgd", "--criterion", f"{mine}:smooth"])
    code.check_code(args)
    assert code.load_function("opt", args).__module__ == code.load_function("criterion", args).__module__
    assert mine.with_name("mine.py.ran").read_text() == "x"


def test_own_code_that_does_the_same_gives_the_same_numbers(started, mine, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    started.go_on(tmp_path, theirs, "--label-smoothing", "0.1").check()
    outcome = started.go_on(tmp_path, ours, "--opt", f"{mine}:sgd", "--criterion", f"{mine}:smooth").check()
    found, expected = (load_checkpoint(out / "checkpoint.pth", "it")["model"] for out in (ours, theirs))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert f"--criterion {mine}:smooth" in outcome.output  # the command to evaluate it


def test_an_own_optimizer_has_the_bits_of_torchs(started, mine, tmp_path):
    started.go_on(tmp_path, tmp_path / "ours", "--epochs", 2, "--opt", f"{mine}:sgd").check()
    check_same_weights(tmp_path / "ours", started.out, "model", "optimizer")


def test_a_changed_file_is_refused_unless_allowed_and_a_moved_one_is_the_same(started, mine, tmp_path):
    own, out = ["--criterion", f"{mine}:smooth"], tmp_path / "out"
    started.go_on(tmp_path, out, *own, "--epochs", 1).check()
    (tmp_path / "elsewhere").mkdir()
    moved = mine.rename(tmp_path / "elsewhere" / "mine.py")
    own = ["--criterion", f"{moved}:smooth", "--resume", "auto", "--epochs", 1]
    started.go_on(tmp_path, out, *own).check()
    moved.write_text(SAME + "\n")
    refused(started.go_on(tmp_path, out, *own), "code criterion ", "give --allow-change code")
    assert "changed as --allow-change says: code" in started.go_on(tmp_path, out, *own, "--allow-change", "code").output


@pytest.mark.parametrize(("own", "words"), [
    ("--opt {}:nothing", "has no function nothing"), ("--criterion {}:smoth", "did you mean smooth"),
    ("--criterion {}:no_loss", "returned a int, expected a loss"),
    ("--opt {}:no_optimizer", "returned a list, expected a torch.optim.Optimizer"),
    ("--opt {}:needs_more", "missing 1 required positional argument: 'rho'"),
    ("--opt {}x.py:sgd", "there is no such file"), ("--criterion focal", "expected FILE.py:FUNCTION"),
    ("--criterion {}:smooth --bce-loss", "--criterion and --bce-loss are both losses"),
    ("--opt {}:sgd --opt-eps 1", "has no such option"),
])  # fmt: skip
def test_own_code_that_cannot_be_used_is_one_line(started, mine, tmp_path, own, words):
    refused(started.go_on(tmp_path, tmp_path / "out", *own.format(mine).split()), words)


def test_code_that_a_recipe_names_is_not_run(started, mine, tmp_path):
    (tmp_path / "r.toml").write_text(f'title = "r"\n[optimization]\ncriterion = "{mine}:smooth"\n')
    argv = [*started.argv, "--output-dir", tmp_path / "out", "--recipe", tmp_path / "r.toml"]
    refused(
        run_train(tmp_path, *argv), "which is code and is run only where the command line names it: give --criterion"
    )


def test_an_evaluation_without_the_loss_says_so(started, mine, tmp_path):
    started.go_on(tmp_path, tmp_path / "out", "--criterion", f"{mine}:smooth", "--epochs", 1).check()
    argv = [*started.argv, "--test-only", "--resume", tmp_path / "out" / "checkpoint.pth"]
    assert "the loss is the usual one: --criterion" in run_train(tmp_path, *argv).check().output
    assert "the usual one" not in run_train(tmp_path, *argv, "--criterion", f"{mine}:smooth").check().output
