"""docs/launching.md, as far as one machine can try it: shells, options, and what the image holds."""

import json
import os
import pty
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY, some_slow, wait_for
from tests.started import SMALL_PLAIN

PAGE = (REPOSITORY / "docs" / "launching.md").read_text()
BASH = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
SCRIPTS = {
    **{f"block{number}": f"#!/usr/bin/env bash\n{block}" for number, block in enumerate(BASH)},
    **{path.name: path.read_text() for path in (REPOSITORY / "scripts").glob("*.sh")},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_shell_block_and_script_is_sound(name, tmp_path):
    if not shutil.which("shellcheck") and "CI" not in os.environ:
        pytest.skip("shellcheck is not installed")
    script = tmp_path / name
    script.write_text(SCRIPTS[name])
    # Not said: that functions are unreachable which only a trap calls, and that A && B || C is no if.
    for command in (["bash", "-n"], ["shellcheck", "--severity=info", "--exclude=SC2317,SC2329,SC2015"]):
        done = subprocess.run([*command, script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_holds_every_module_and_package_and_nothing_else():
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.check_output(listed, text=True, timeout=60, cwd=REPOSITORY).split()
    packages = {name.split("/")[0] for name in tracked if re.fullmatch(r"\w+/(.*\.py|\w+\.toml)", name)} - {"tests"}
    lines = (REPOSITORY / "scripts" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    sources = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    assert sources == packages | {"*.py", "LICENSE", "requirements.txt"}
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    assert "*" in ignored


# What stands for torchrun: says how it was started, and ends as it is told.
TORCHRUN = """#!/usr/bin/env bash
echo "$*" > "$OUT/said"
{action}
"""


def start_container(folder, action, **programs):
    out, own = folder / "out", folder / "bin"
    out.mkdir()
    own.mkdir()
    for name, text in {"torchrun": TORCHRUN.format(action=action), **programs}.items():
        (own / name).write_text(text)
        (own / name).chmod(stat.S_IRWXU)
    environment = {**os.environ, "PATH": f"{own}:{os.environ['PATH']}", "OUT": str(out)}
    environment |= {} if programs else {"PET_NPROC_PER_NODE": "1"}
    return subprocess.Popen([REPOSITORY / "scripts" / "container.sh", "--epochs", "3"], env=environment)


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("finished", 0, 0), ("stopped", 0, 0), ("preempted", 0, 1), ("running", 1, 1), ("failed", 3, 3),
     ("finished", 2, 2), (None, 0, 1)],
)  # fmt: skip
def test_a_container_succeeds_only_when_its_run_is_finished(tmp_path, state, code, expected):
    write = f"""echo '{{"state": "{state}"}}' > "$OUT/status.json";""" if state else ""
    assert start_container(tmp_path, f"{write} exit {code}").wait(30) == expected
    assert (tmp_path / "out" / "said").read_text() == f"train.py --output-dir {tmp_path}/out --resume auto --epochs 3\n"


@pytest.mark.parametrize(("action", "programs", "left"), [
    ("""trap 'sleep 0.5; touch "$OUT/saved"; exit 0' TERM; touch "$OUT/ready"; while :; do sleep 0.1; done""",
     {}, {"said", "ready", "saved"}),
    ("", {"python3": '#!/usr/bin/env bash\ntouch "$OUT/ready"\nsleep 1\n'}, {"ready"}),  # it looks for a GPU
])  # fmt: skip
def test_a_container_that_is_told_to_end_does_not_begin_or_tells_torchrun_and_waits(tmp_path, action, programs, left):
    container = start_container(tmp_path, action, **programs)
    wait_for((tmp_path / "out" / "ready").exists)
    container.send_signal(signal.SIGTERM)
    assert container.wait(30) == 1
    assert {path.name for path in tmp_path.glob("out/*")} == left


# Fails in training, and with REFUSED in the trial before it too, unless torchrun has restarted.
OWN = """
import os
from torch import nn

class Loss(nn.CrossEntropyLoss):
    def forward(self, output, target):
        if len(output) == 4 or ("REFUSED" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
            raise ZeroDivisionError("a bug")
        return super().forward(output, target)
"""
RUN = "--synthetic 8 --epochs 1 --batch-size 4 --model tests/tiny.py:Tiny"


@pytest.mark.dist  # with the real torchrun, without a GPU
@pytest.mark.parametrize(("words", "variables", "code", "expected"), [
    ("--data-path /nowhere", {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "1"}, 2, "/nowhere is not a folder"),
    (f"{RUN} --criterion own.py:Loss", {"REFUSED": "", "PET_MAX_RESTARTS": "1"}, 1, "ZeroDivisionError: a bug"),
    pytest.param(RUN, {}, 0, "1 process on this node", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_container_ends_with_2_for_a_start_that_was_refused_alone(tmp_path, words, variables, code, expected):
    (tmp_path / "own.py").write_text(OWN)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY),
        "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **variables,
    }  # fmt: skip
    command = [REPOSITORY / "scripts" / "container.sh", *words.replace("own.py", str(tmp_path / "own.py")).split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert not [*tmp_path.glob("tmp.*")]  # the refusals
    assert (done.returncode, expected in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


NOHUP = {"torchrun": "preempted", "torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT": "running"}


@pytest.mark.parametrize("command", some_slow(NOHUP, {"torchrun"}))
def test_a_hang_up_under_nohup_is_survived_as_the_page_says_and_else_the_start_says_so(command, tmp_path):
    page = " ".join((REPOSITORY / "docs" / "runs.md").read_text().split())
    assert f"`nohup {[*NOHUP][1]} ...`" in page
    terminal, stdin = pty.openpty()
    words = ["--standalone", "--nproc_per_node=2", *command.split()[1:], REPOSITORY / "train.py", *SMALL_PLAIN]
    words += ["--synthetic", "16", "--batch-size", "8", "--epochs", "99999", "--output-dir", tmp_path / "out"]
    argv = ["nohup", sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    log = tmp_path / "log"
    with log.open("w") as output:
        agent = subprocess.Popen(argv, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_for(lambda: "Epoch: [1]" in log.read_text())
        agent.send_signal(signal.SIGHUP)
        epoch = re.findall(r"Epoch: \[(\d+)\]", log.read_text())[-1]
        if NOHUP[command] == "running":
            wait_for(lambda: f"Epoch: [{int(epoch) + 20}]" in log.read_text())
        else:
            assert agent.wait(60) == 1
        assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == NOHUP[command]
        assert log.read_text().count("torchrun overrides nohup") == (NOHUP[command] == "preempted")
    finally:
        agent.terminate()
        agent.wait(60)
        os.close(terminal), os.close(stdin)
