"""A SLURM step's environment, read without a SLURM."""

import pytest

from launchers import World, world
from launchers.world import master_address

STEP = {
    "SLURM_JOB_ID": "10012",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "10.0.0.7",
}


def test_a_task_is_a_rank():
    assert World.detect(STEP) == World(3, 5, 1, 2, "slurm")


def test_the_port_follows_from_the_job_and_the_address_from_the_first_node(monkeypatch):
    monkeypatch.setattr(world, "node_address", {"gpu07": "10.0.0.7"}.__getitem__)
    without = {key: value for key, value in STEP.items() if key != "MASTER_ADDR"}
    assert master_address(without) == ("10.0.0.7", 20012)


def test_what_torchrun_sets_inside_of_a_step_comes_first():
    inside = {**STEP, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert World.detect(inside) == World(0, 1, 0, 1, "torchrun")


@pytest.mark.parametrize("change", [{"SLURM_STEP_ID": ""}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_batch_script_and_a_shell_in_an_allocation_are_no_ranks(change):
    assert World.detect({**STEP, **change}) is None


@pytest.mark.parametrize(
    ("short", "first"),
    [("n1", "n1"), ("n[1-3]", "n1"), ("b,a[08-10]", "b"), ("a[08,10],b", "a08"), ("r[1,3]-n[2-5]", "r1-n2")],
)
def test_the_first_node_is_read_from_slurms_short_form(short, first):
    assert world.first_node(short) == first
