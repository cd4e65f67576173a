"""Who a process is, by its environment: torchrun's names, or those of a SLURM step or of mpirun."""

import pytest

from common.errors import LaunchError
from launchers import World, world
from launchers.world import master_address

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


STEP = {
    "SLURM_JOB_ID": "10012", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "MASTER_ADDR": "10.0.0.7",
}  # fmt: skip
LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "n1"}
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        pytest.param({"MASTER_ADDR": "127.0.0.1"}, None, id="no rank"),
        ({**TWO, "MASTER_ADDR": "localhost"}, World(1, 2, 1, 2, "environment")),
        pytest.param({**TWO, "MASTER_ADDR": "train-master-0"}, World(1, 2, 0, 1, "environment"), id="a pod holds one"),
        ({**TWO, **LOCAL, "MASTER_ADDR": "node1", **UNDER_TORCHRUN}, World(1, 2, 0, 1, "torchrun")),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1, "environment"), id="one needs no address"),
        (STEP, World(3, 5, 1, 2, "slurm")),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "1", **UNDER_TORCHRUN}, World(0, 1, 0, 1, "torchrun")),
        (OPEN_MPI, World(3, 4, 1, 2, "environment")),
        ({**MPICH, "MASTER_PORT": "29500"}, World(3, 4, 1, 2, "environment")),
        pytest.param({**STEP, **OPEN_MPI}, World(3, 4, 1, 2, "environment"), id="mpirun in an allocation"),
        ({**OPEN_MPI, **TWO}, World(1, 2, 1, 2, "environment")),
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None, id="mpirun -n 1"),
        pytest.param({**STEP, "SLURM_STEP_ID": ""}, None, id="a batch script"),
        pytest.param({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None, id="a shell in an allocation"),
    ],
)
def test_the_environment_tells_who_a_process_is(environ, found):
    assert World.detect(environ) == found


def test_mpirun_without_an_address_is_told_how_to_pass_one_on():
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set.*mpirun passes them on with -x MASTER_ADDR"):
        World.detect({**OPEN_MPI, "MASTER_ADDR": ""})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(change, message):
    with pytest.raises(LaunchError, match=message):
        World.detect({**TWO, **change})


def test_the_port_follows_from_the_job_and_the_address_from_the_first_node(monkeypatch):
    monkeypatch.setattr(world, "node_address", {"gpu07": "10.0.0.7"}.__getitem__)
    without = {key: value for key, value in STEP.items() if key != "MASTER_ADDR"}
    assert master_address(without) == ("10.0.0.7", 20012)


@pytest.mark.parametrize(
    ("short", "first"),
    [("n1", "n1"), ("n[1-3]", "n1"), ("b,a[08-10]", "b"), ("a[08,10],b", "a08"), ("r[1,3]-n[2-5]", "r1-n2")],
)
def test_the_first_node_is_read_from_slurms_short_form(short, first):
    assert world.first_node(short) == first


def test_two_steps_of_one_job_meet_at_different_ports():
    ports = {master_address({**STEP, "SLURM_STEP_ID": str(step)})[1] for step in range(10)}
    assert len(ports) == 10 and all(20000 <= port < 30000 for port in ports)
