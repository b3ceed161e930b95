"""What is read of the words of torchrun, srun and whoever sets RANK."""

import pytest

import config
from distributed.launch import first_slurm_host, read_launch
from errors import UserError


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("gpu[007-010,12],login1", "gpu007"),
        ("gpu[3,7-9]", "gpu3"),
        ("login1,gpu[007-010]", "login1"),
        ("dgx-a[01-02]-ib", "dgx-a01-ib"),
        ("rack-2-node-03.example.org", "rack-2-node-03.example.org"),
        ("rack[0-3]node[0-7]", "rack0node0"),  # Slurm allows two ranges in one name
    ],
)
def test_first_slurm_host(nodelist, host):
    assert first_slurm_host(nodelist) == host


def test_environment_of_torchrun_is_taken_as_it_is():
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    found = read_launch({**environ, "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert found.environment() == environ
    assert (found.rank, found.world_size, found.local_rank) == (3, 8, 1)
    assert (found.is_torchrun, found.attempt, found.is_restart) == (True, 2, True)


def test_world_size_comes_from_the_option_where_only_the_rank_is_set():
    assert read_launch({"RANK": "1"}, 4).environment() == {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[06-09]", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "8",
}  # fmt: skip


def test_environment_of_srun_is_translated():
    found = read_launch(SRUN).environment()
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}
    assert 20000 <= port < 32000  # below the ports that systems hand out by themselves


def test_tasks_of_a_slurm_step_share_a_port_and_steps_do_not():
    def port(job, step, task):
        own = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": task}
        return read_launch({**SRUN, **own}).environment()["MASTER_PORT"]

    steps = [("4711", "0"), ("4711", "1"), ("4712", "0")]
    ports = [{port(*step, task) for task in ("0", "7")} for step in steps]
    assert [len(tasks) for tasks in ports] == [1, 1, 1]
    assert len(set.union(*ports)) == 3


def test_master_that_the_user_names_wins_under_slurm():
    found = read_launch({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).environment()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_job_node_list_is_used_where_the_step_has_none():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}
    assert read_launch(environ).environment()["MASTER_ADDR"] == "gpu06"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["nothing", "batch script", "srun of one task"],
)
def test_no_launcher(environ):
    assert read_launch(environ).environment() == {}
    assert (read_launch(environ).rank, read_launch(environ).world_size) == (0, 1)


def test_the_processes_of_a_node_are_counted():
    assert read_launch({"RANK": "3", "LOCAL_WORLD_SIZE": "4"}).num_local == 4
    assert read_launch({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}).num_local == 4


def test_a_master_under_srun_needs_no_list_of_nodes():
    environ = {name: value for name, value in SRUN.items() if "NODELIST" not in name}
    found = read_launch({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert found.address == {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_ranks_set_by_hand_under_slurm_share_their_node():
    assert read_launch({**SRUN, "RANK": "5", "SLURM_STEP_TASKS_PER_NODE": "8"}).num_local == 8


def test_world_size_without_a_launcher_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    args = config.parse_args(["--synthetic", "--world-size", "2"])
    with pytest.raises(UserError, match=r"torchrun --nproc_per_node=2 train\.py"):
        config.on_machine(args)
