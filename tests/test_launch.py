"""What launchers say and processes tell each other; docs/launching.md as far as one machine can try it."""

import json
import os
import pty
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed import collectives
from distributed.launch import read_launch
from distributed.slurm import first_slurm_host
from errors import UserError
from settings import config
from tests.ranks import REPOSITORY, run_check, run_ranks, some_slow, train_rank, wait_for
from tests.started import SMALL_PLAIN


def test_first_slurm_host():
    hosts = {"gpu[007-010,12],login1": "gpu007", "login1,gpu[007-010]": "login1", "node1,node2": "node1"}
    hosts |= {"rack[0-3]node[0-7]-ib": "rack0node0-ib", "rack-2.example.org": "rack-2.example.org"}
    assert {nodes: first_slurm_host(nodes) for nodes in hosts} == hosts


SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[06-09]", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "8",
}  # fmt: skip
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
MPI = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in
            {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "3", "LOCAL_SIZE": "4"}.items()}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def without(environ, word):
    return {name: value for name, value in environ.items() if word not in name}


# The variables, and what torch is told of them; the port of a Slurm step is another test's.
LAUNCHES = {
    "torchrun": ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "7"}, TORCHRUN),
    "only the rank": ({"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}),
    "srun": (SRUN, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}),
    "srun with a master": ({**without(SRUN, "NODELIST"), **BY_HAND}, {"RANK": "5", **BY_HAND}),
    "srun without the step's nodes": (without(SRUN, "STEP_NODELIST"), {"MASTER_ADDR": "gpu06"}),
    "Open MPI": ({**OPEN_MPI, "PMIX_RANK": "3", "PMIX_NAMESPACE": "9"}, {**MPI, "MASTER_ADDR": "127.0.0.1"}),
    "MPICH": (MPICH, {**MPI, "MASTER_ADDR": "127.0.0.1"}),
    "MPI on two machines": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_ADDR": "h"},
        {"RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"},
    ),
    "MPI in an allocation": ({**SRUN, **OPEN_MPI}, MPI),
    "MPI and by hand": ({**OPEN_MPI, **BY_HAND}, {**MPI, **BY_HAND}),
    "torchrun in MPI": ({**MPICH, **TORCHRUN}, TORCHRUN),
    "MPI of one process": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}),
    "srun with PMI 2": ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, {"RANK": "5", "MASTER_ADDR": "gpu07"}),
    "srun with PMIx": ({**SRUN, "PMIX_RANK": "5"}, {"RANK": "5", "MASTER_ADDR": "gpu07"}),
    "a variable called MPI": ({"MPI": "openmpi"}, {}),
    "nothing": ({}, {}),
    "a batch script": (without(SRUN, "STEP"), {}),
    "srun of one task": ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {}),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_torch_is_told_of_the_other_processes(name):
    environ, expected = LAUNCHES[name]
    launch = read_launch(environ, 4)
    found = launch.environment()
    assert expected.items() <= found.items()
    assert bool(found) == launch.is_launched == bool(expected)
    assert launch.is_torchrun == ("torchrun" in name and "TORCHELASTIC_RUN_ID" in environ)


def test_tasks_of_a_slurm_step_share_a_port_and_steps_do_not():
    def port(job, step, task):
        own = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": task}
        return int(read_launch({**SRUN, **own}).environment()["MASTER_PORT"])

    steps = [("4711", "0"), ("4711", "1"), ("4712", "0")]
    ports = [{port(*step, task) for task in ("0", "7")} for step in steps]
    assert [len(tasks) for tasks in ports] == [1, 1, 1]
    assert len(set.union(*ports)) == 3
    assert all(20000 <= each < 32000 for tasks in ports for each in tasks)  # below those that systems hand out


REFUSED = [
    ({"PMIX_RANK": "1"}, "PMIX_RANK is set by a launcher that does not tell how many processes a machine has"),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK is set by a launcher that does not tell"),
    ({**MPICH, "MPI_LOCALNRANKS": "2"}, "MASTER_ADDR is not set, and mpirun uses several machines"),
]  # fmt: skip
WRONG = [
    {"RANK": "abc"}, {"RANK": ""}, {"RANK": "-1"}, {**TORCHRUN, "WORLD_SIZE": "0"}, {**TORCHRUN, "LOCAL_RANK": "x"},
    {**TORCHRUN, "MASTER_PORT": "abc"}, {**TORCHRUN, "MASTER_PORT": "99999"}, {"LOCAL_WORLD_SIZE": "0"},
    {"TORCHELASTIC_RESTART_COUNT": "x"}, {"SLURM_STEP_TASKS_PER_NODE": "(x2)"}, {"GROUP_WORLD_SIZE": "9" * 5000},
    without(SRUN, "PROCID"), {**TORCHRUN, "RANK": "8"}, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"},
]  # fmt: skip


@pytest.mark.parametrize(("environ", "words"), [*REFUSED, *((each, r"^[A-Z_]+ is .*unset it") for each in WRONG)])
def test_a_variable_that_is_no_number_is_missing_or_tells_too_little_is_named(environ, words):
    with pytest.raises(UserError, match=words):
        read_launch(environ)


STEP = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "24"}
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


@pytest.mark.parametrize(("environ", "found"), [
    ({"RANK": "3", "LOCAL_WORLD_SIZE": "4"}, {"num_local": 4}), (STEP, {"num_local": 4, "cores": 6}),
    ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "2"}, {"num_restarts": 2}),
    ({**STEP, "SLURM_CPUS_PER_TASK": "64"}, {"cores": 6}),  # of the batch script
    ({**STEP, **ONE_TASK, **TORCHRUN, "TORCHELASTIC_RUN_ID": "7", "LOCAL_WORLD_SIZE": "3"}, {"cores": 2}),
    ({**STEP, **TORCHRUN}, {"cores": 6}),  # set by hand from srun's
    *((each, {"cores": None}) for each in (without(STEP, "STEP"), without(STEP, "PER_TASK"), {**STEP, **OPEN_MPI}, {})),
])  # fmt: skip
def test_the_processes_of_a_node_restarts_and_the_cores_of_a_task_are_counted(environ, found):
    assert found.items() <= read_launch(environ)._asdict().items()


def test_a_task_of_one_core_has_one_worker_whatever_the_machine_has(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | ONE_TASK | {"SLURM_CPUS_PER_TASK": "1"})
    args, lines = config.on_machine(config.parse_args(["--synthetic"]))
    assert args.data.workers == 1
    assert "--workers 1: of this process's 1 core (srun --cpus-per-task), at most 16" in lines


def test_srun_without_its_nodes_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | without(SRUN, "NODELIST"))
    with pytest.raises(UserError, match="not MASTER_ADDR"):
        config.on_machine(config.parse_args(["--synthetic"]))


def check_all(rank, world_size, folder):
    assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert collectives.is_main_process() == (rank == 0)
    print("printed")
    print(f"forced {rank}", force=True)

    rows = torch.arange(4 * rank).reshape(2 * rank, 2) + 100 * rank
    gathered = collectives.all_gather(rows)
    for other in range(world_size):
        assert torch.equal(gathered[other], torch.arange(4 * other).reshape(2 * other, 2) + 100 * other), gathered
    assert [part.shape for part in collectives.all_gather(torch.zeros(0, 2))] == [(0, 2)] * world_size
    dealt = torch.arange(7, dtype=torch.float64)[:, None]
    assert torch.equal(collectives.interleave(collectives.all_gather(dealt[rank::world_size])), dealt)

    for payload in (b"", b"x", bytes(range(256)) * 1000):
        assert collectives.broadcast_bytes(payload if rank == 0 else None) == payload
    assert collectives.broadcast_bytes(b"of rank 0" if rank == 0 else b"ignored and longer") == b"of rank 0"

    def work(text):
        with (folder / "calls").open("a") as file:
            file.write(text)
        return text * 3

    def refuse():
        raise UserError("no usable file", exit_code=4)

    assert collectives.call_on_master(work, "once") == "onceonceonce"
    assert collectives.call_on_master(lambda: None) is None
    with pytest.raises(UserError, match="no usable file") as refusal:
        collectives.call_on_master(refuse)
    assert refusal.value.exit_code == 4


@pytest.mark.dist
def test_what_ranks_exchange_and_that_they_print_once(tmp_path):
    outcome = run_check(3, check_all, tmp_path, tmp_path)
    assert outcome.output.count("printed") == 1
    assert [f"forced {rank}" in output for rank, output in enumerate(outcome.outputs)] == [True] * 3
    assert (tmp_path / "calls").read_text() == "once"


def test_a_low_limit_of_open_files_is_raised_or_one_line(tmp_path):
    argv = [*SMALL_PLAIN, "--synthetic", "16", "--batch-size", "2", "--epochs", "1", "--output-dir", tmp_path / "out"]
    argv, limit = [*map(str, argv)], (resource.setrlimit, resource.RLIMIT_NOFILE)
    run_ranks(train_rank, 4, argv, [], (*limit, (33, 400)), log_folder=tmp_path).check()
    done = run_ranks(train_rank, 4, [*argv, "--overwrite"], [], (*limit, (31, 31)), log_folder=tmp_path)
    assert done.codes[0] == 2
    assert done.outputs[0].count("4 processes need 32 open files each; `ulimit -Hn` allows 31: raise it") == 1


GROUPS = {  # /proc/self/cgroup, the files below /sys/fs/cgroup, and the cores
    "version 2, a fraction": ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 2),
    "version 2, of an ancestor": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),
    "version 2, in a container": ("0::/", {"cpu.max": "10000 100000"}, 1),
    "version 1": ("3:cpuset:/x\n2:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "5", "cpu/x/cpu.cfs_period_us": "9"}, 1),
    "version 1, the host's path": ("1:cpu:/docker/f", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "9"}, 1),
    "another controller": ("1:cpuset:/x", {"cpu/x/cpu.cfs_quota_us": "1", "cpu/x/cpu.cfs_period_us": "9"}, 99),
    "no limit": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, 99),
    "no groups": ("", {}, 99),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_a_share_of_the_processors_counts_as_so_many_cores(name, tmp_path):
    groups, files, expected = GROUPS[name]
    for place, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{path}": files[path] for path in files}}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"{text}\n")
    assert collectives.count_cores(tmp_path) == min(expected, len(os.sched_getaffinity(0)))


def in_half_a_core(folder, argv):
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(2)
    train_rank(argv)


def test_a_run_in_a_group_with_half_a_core_uses_one_thread_and_one_loader_process(tmp_path):
    is_first = Path("/sys/fs/cgroup/cpu").is_dir()
    group = Path("/sys/fs/cgroup") / ("cpu" if is_first else "") / f"touchstone-{os.getpid()}"
    name, text = ("cpu.cfs_quota_us", "50000") if is_first else ("cpu.max", "50000 100000")
    words = " ".join(SMALL_PLAIN).replace("--workers 0", "--synthetic 16 --batch-size 8 --epochs 1").split()
    try:
        (group / "inner").mkdir(parents=True)
        (group / name).write_text(text)
        words += ["--output-dir", str(tmp_path / "out")]
        run_ranks(in_half_a_core, 1, group / "inner", words, log_folder=tmp_path).check()
    except OSError:
        pytest.skip("needs root, and control groups that can be written")
    finally:
        for folder in filter(Path.is_dir, (group / "inner", group)):
            folder.rmdir()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["args"]["workers"] == record["environment"]["threads"] == 1
    assert record["processor"].startswith("1 cores of")


BASH = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs" / "launching.md").read_text(), flags=re.S)
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
AGENT = """#!/usr/bin/env bash
echo "$*" > "$OUT/said"
{action}
"""


def start_container(folder, action, **programs):
    out, own = folder / "out", folder / "bin"
    out.mkdir()
    own.mkdir()
    for name, text in {"torchrun": AGENT.format(action=action), **programs}.items():
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


yaml = pytest.importorskip("yaml")

FOLDER = REPOSITORY / "scripts"
OBJECTS = {
    each["kind"]: each
    for name in ("kubernetes.yaml", "pytorchjob.yaml")
    for each in yaml.safe_load_all((FOLDER / name).read_text())
}
JOB_SET = OBJECTS["TrainingRuntime"]["spec"]["template"]["spec"]
JOB = JOB_SET["replicatedJobs"][0]["template"]
WORKER = OBJECTS["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]


def read_back(given):
    """Return an object as Kubeflow's own types hold it: without fields that they do not know."""
    if given["kind"] == "PyTorchJob":
        client = pytest.importorskip("kubeflow.training.api_client").ApiClient()
        utils = pytest.importorskip("kubeflow.training.utils.utils")
        held = client.deserialize(utils.FakeResponse(given), "KubeflowOrgV1PyTorchJob")
        return client.sanitize_for_serialization(held)
    trainer = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(trainer, f"TrainerV1alpha1{given['kind']}").from_dict(given).to_dict()


@pytest.mark.parametrize("kind", OBJECTS)
def test_kubeflow_knows_every_field(kind):
    assert read_back(OBJECTS[kind]) == OBJECTS[kind]
    misspelt = OBJECTS[kind] | {"spec": OBJECTS[kind]["spec"] | {"restarts": 3}}
    assert read_back(misspelt) == OBJECTS[kind]


@pytest.mark.parametrize("given", [
    {"apiVersion": "batch/v1", "kind": "Job", **JOB},
    {"apiVersion": "v1", "kind": "PodTemplate", "template": WORKER["template"]},
], ids=["Job", "PodTemplate"])  # fmt: skip
def test_kubernetes_knows_every_field_of_a_pod_and_its_job(given):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(given, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(given | {"fsGruop": 1000}, "1.31", strict=True)


def test_exit_code_2_ends_the_job_and_any_other_starts_all_pods_again():
    # podFailurePolicy is refused with any other restartPolicy, and without one a JobSet sets OnFailure.
    assert JOB["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    codes = {"containerName": "node", "operator": "In", "values": [2]}
    assert JOB["spec"]["podFailurePolicy"] == {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    assert JOB["spec"]["backoffLimit"] == 0
    rule = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert JOB_SET["failurePolicy"] == {"maxRestarts": 1000, "rules": [rule]}
    # A PyTorchJob has no such rule; OnFailure restarts a container whatever its code, ExitCode only above 127.
    assert (WORKER["restartPolicy"], OBJECTS["PyTorchJob"]["spec"]["runPolicy"]) == ("OnFailure", {"backoffLimit": 10})


@pytest.mark.parametrize("pod", [JOB["spec"]["template"]["spec"], WORKER["template"]["spec"]], ids=["v2", "v1"])
def test_a_pod_writes_to_its_claims_and_has_time_to_save(pod):
    user = int(re.search(r"^USER (\d+)$", (FOLDER / "Dockerfile").read_text(), flags=re.M)[1])
    assert pod["securityContext"] == {"fsGroup": user}
    save_s = int(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", (FOLDER / "container.sh").read_text())[1])
    assert pod["terminationGracePeriodSeconds"] > save_s
