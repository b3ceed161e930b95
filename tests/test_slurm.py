"""scripts/slurm.sh and srun under a real Slurm: one node, on this machine, that hears and speaks on loopback only."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed.signals import end_with_parent
from tests import faults
from tests.endings import differing_results
from tests.ranks import REPOSITORY, free_port, run_ranks, train_rank, wait_for
from tests.started import PLAIN

DAEMONS = ["munged", "slurmctld", "slurmd"]
# CI must not pass without it; who has it not may still run the other tests.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not (os.geteuid() == 0 and all(map(shutil.which, DAEMONS))) and "CI" not in os.environ,
        reason="needs root, and Debian's slurm-wlm and munge",
    ),
]

# As of the faults, for twelve steps in all, and with a model that a Python of its own knows.
OPTIONS = [*faults.OPTIONS, "--model", PLAIN, *"--epochs 4 --batch-size 2 --global-batch-size 8".split()]

# Higher partitions take the CPUs that they need from jobs in lower ones, at once or after a time of grace.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
KillWait=60
OverTimeLimit=3
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=64
PartitionName=low Nodes={host} PriorityTier=1 PreemptMode=REQUEUE
PartitionName=graceful Nodes={host} PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes={host} PriorityTier=2 PreemptMode=OFF Default=YES
"""
# So many that a job in the high partition needs those of all others.
LOW, GRACEFUL = ["--partition=low", "--cpus-per-task=17"], ["--partition=graceful", "--cpus-per-task=17"]

# Trains, and waits in the fifth step until it is told to stop: by its first start's end, for the log is a single one.
HELD = f"""
import os, pathlib, runpy, sys, time
import torch
step, calls = torch.optim.SGD.step, []

def held(*args, **kwargs):
    calls.append(1)
    while len(calls) == 5 and "SIGTERM: stopping after this step" not in pathlib.Path("log").read_text():
        time.sleep(0.1)
    return step(*args, **kwargs)

torch.optim.SGD.step = held
sys.path.insert(0, {str(REPOSITORY)!r})
runpy.run_path({str(REPOSITORY / "train.py")!r}, run_name="__main__")
"""


class Cluster:
    """A Slurm of one node, all of its files in one folder; its processes end with this one."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(stat.S_IRUSR)
        ports = {"controller_port": free_port(), "node_port": free_port()}
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, **ports))
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = outside | {
            "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "GPUS": "2",
        }  # fmt: skip
        names = {"key-file": "munge.key", "log-file": "munged.log", "seed-file": "seed"}
        names |= {"pid-file": "munged.pid", "socket": "munge.socket"}
        munged = ["munged", "--foreground", "--force", *(f"--{key}={folder / name}" for key, name in names.items())]
        self.daemons = [self._start(munged)]
        wait_for((folder / "munge.socket").exists, 20)
        self.daemons += [self._start(["slurmctld", "-D", "-c"]), self._start(["slurmd", "-D", "-N", host])]
        wait_for(lambda: self.call("sinfo", "--noheader", "--format=%T", check=False) in ("idle", "idle\nidle"), 60)

    def _start(self, command):
        with open(self.folder / f"{command[0]}.out", "w") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=self.folder,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )  # fmt: skip

    def end(self):
        jobs = self.call("squeue", "--noheader", "--format=%i", check=False).split()
        if jobs:
            self.call("scancel", *jobs, check=False)
            wait_for(lambda: not self.call("squeue", "--noheader", check=False), 90)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(20)

    def call(self, *command, check=True):
        how = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60, "cwd": self.folder}
        return subprocess.run(command, check=check, **how).stdout.strip()

    def submit(self, folder, *options, script=REPOSITORY / "scripts" / "slurm.sh", argv=()):
        command = ["sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=1", "--output=log"]
        command += [f"--chdir={folder}", *options]
        environment = {**self.environment, "OUT": str(folder / "out")}
        return subprocess.check_output([*command, str(script), *argv], env=environment, text=True).strip()

    def job(self, job):
        words = self.call("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job):
        wait_for(lambda: self.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 120)
        record = self.job(job)
        return record["JobState"], int(record["Restarts"]), int(record["ExitCode"].split(":")[0])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def limited(cluster, image_folder, tmp_path_factory):
    """A job that waits for its time limit, submitted before all others, for Slurm looks every 30 s; and its oracle."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "train.py").write_text(HELD)
    options = ["--data-path", str(image_folder), *OPTIONS]
    job = cluster.submit(folder, "--time=1", argv=options)
    undisturbed = folder / "undisturbed"
    run_ranks(train_rank, 1, [*options, "--output-dir", str(undisturbed)], log_folder=folder).check()
    return SimpleNamespace(folder=folder, options=options, job=job, undisturbed=undisturbed)


def check_same(folder, limited):
    log = (folder / "log").read_text()
    assert "all 2 ranks stopped after step" in log, log
    assert differing_results(folder / "out", limited.undisturbed) == []
    assert json.loads((folder / "out" / "status.json").read_text())["state"] == "finished"


# What stands for torchrun, at a job's first start; at the next one it finishes.
TORCHRUN = """#!/bin/bash
write() { echo "{\\"state\\": \\"$1\\", \\"requeue\\": $2}" > "$OUT/status.json"; }
train() { trap 'write preempted true; exit 1' TERM; write running false; while true; do sleep 0.1; done; }
[ -z "${SLURM_RESTART_COUNT:-}" ] || { write finished false; exit; }
"""
# Stands before Slurm's own: on a busy node, SIGTERM reaches what the script runs after the step that it has ended, and
# Slurm may not answer at once, nor say that the job runs.
SCONTROL = f"""#!/bin/bash
kill -TERM $$
[ -e answered ] || {{ touch answered; exit 1; }}
[ -e signaling ] || {{ touch signaling; {shutil.which("scontrol")} "$@" | sed s/=RUNNING/=SIGNALING/; exit; }}
exec {shutil.which("scontrol")} "$@"
"""
# What it does then, and how the job ends: state, restarts, exit code.
JOBS = {
    "finished": ("write finished false", "COMPLETED", 0, 0),
    "failing after it finished": ("write finished false; exit 1", "COMPLETED", 0, 0),
    "stopped after an epoch": ("write stopped false", "COMPLETED", 0, 0),
    "crashed": ("write failed false; exit 1", "FAILED", 0, 1),
    "in vain": ("write preempted false; exit 1", "FAILED", 0, 1),
    "died before it began": ("exit 7", "FAILED", 0, 7),
    "told to stop by somebody": ("write preempted true; exit 1", "COMPLETED", 1, 0),
    "warned while it starts": ("sleep 3; train", "COMPLETED", 1, 0),
    "preempted": ("train", "COMPLETED", 1, 0),
    "preempted with time left": ("train", "COMPLETED", 1, 0),
    "preempted while it starts": ("sleep 60", "COMPLETED", 1, 0),
    "cancelled": ("train", "CANCELLED", 0, 1),
}


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """Return how each job of the table ended: all of them at once, for each needs seconds and hardly a CPU."""
    jobs, folder = {}, tmp_path_factory.mktemp("jobs")
    for name, (action, *_) in JOBS.items():
        own = folder / name.replace(" ", "-")
        (own / "out").mkdir(parents=True)
        (own / "out" / "status.json").write_text('{"state": "preempted", "requeue": true, "earlier": 1}')
        for program, text in {"torchrun": TORCHRUN + action, "scontrol": SCONTROL}.items():
            (own / program).write_text(text)
            (own / program).chmod(stat.S_IRWXU)
        options = (GRACEFUL if name[9:] else LOW) if name.startswith("preempted") else []
        jobs[name] = cluster.submit(own, f"--export=ALL,PATH={own}:{cluster.environment['PATH']}", *options)
    for name in jobs:
        if name.startswith(("warned", "preempted", "cancelled")):
            step = f"{jobs[name]}.0"
            wait_for(lambda step=step: step in cluster.call("squeue", "--steps", "--noheader", "--format=%i").split())
    for name in ("preempted", "preempted-with-time-left", "cancelled"):
        wait_for(lambda name=name: "running" in (folder / name / "out" / "status.json").read_text())
    cluster.call("scancel", "--batch", "--signal=USR1", jobs["warned while it starts"])  # as at the time limit
    cluster.call("scancel", jobs["cancelled"])
    cluster.call("sbatch", "--partition=high", "--cpus-per-task=50", "--output=/dev/null", "--wrap=sleep 1")
    return {name: cluster.wait_for_end(job) for name, job in jobs.items()}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_requeues_what_was_preempted_and_nothing_else(limited, ended, name):
    # A cancelled job has srun's own code or the rank's, whichever Slurm hears first.
    assert ended[name] in ([JOBS[name][1:], ("CANCELLED", 0, 255)] if name == "cancelled" else [JOBS[name][1:]])


@pytest.mark.slow
@pytest.mark.dist
def test_srun_without_torchrun_saves_at_the_time_limit_and_resumes_with_the_same_bits(cluster, limited, tmp_path):
    (tmp_path / "train.py").write_text(HELD)
    command = [sys.executable, "train.py", *limited.options, "--output-dir", "out"]
    for options in (["--time=1", "--signal=TERM@10"], []):
        with open(tmp_path / "log", "a") as log:
            subprocess.run(
                ["srun", "--ntasks=2", *options, *command],
                stdout=log, stderr=log, env=cluster.environment, cwd=tmp_path, timeout=180, check=True,
            )  # fmt: skip
    check_same(tmp_path, limited)


@pytest.mark.dist
def test_a_job_that_reaches_its_time_limit_saves_and_resumes_with_the_same_bits(cluster, limited):
    state, restarts, _ = cluster.wait_for_end(limited.job)
    assert (state, restarts >= 1) == ("COMPLETED", True)  # more than 1 on a slow machine
    check_same(limited.folder, limited)
