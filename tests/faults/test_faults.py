"""Runs that meet with faults, in short; all of them, by the hundred: python -m benchmarks faults."""

import pytest
from faults.plan import Fault
from faults.trials import damage, interrupt, kill, moments, poison, soak, spaced


def wrong(trials):
    return [trial for trial in trials if not trial.survived or trial.equal is False or trial.problem]


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_ends_with_the_same_bits(tmp_path):
    faults = spaced([Fault("kill", 1, "backward", 0), Fault("kill", 0, "publish", 0)])
    assert not wrong(kill("pipelined", faults, tmp_path))


@pytest.mark.slow
def test_a_run_whose_ranks_share_the_weights_and_are_killed_in_a_save_ends_with_the_same_bits(tmp_path):
    points = [(1, "write_file"), (0, "write_file"), (1, "copy_tensors")]
    faults = [Fault("kill", rank, point, 0) for rank, point in (*points, (0, "publish"))]
    assert not wrong(kill("fsdp", spaced(faults), tmp_path))


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_goes_on_to_the_same_bits(tmp_path):
    assert not wrong(interrupt("single", moments("single", 1, seed=1), tmp_path))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_found_and_the_one_before_is_used(tmp_path):
    assert not wrong(damage("single", tmp_path, ["bit-flipped"], ["model-00.safetensors"]))


@pytest.mark.slow
def test_all_ranks_skip_a_step_whose_gradient_is_not_finite_on_one(tmp_path):
    assert not wrong([poison("ddp", 1, tmp_path)])


@pytest.mark.slow
def test_a_long_run_ends_with_the_memory_and_the_descriptors_with_which_it_began(tmp_path):
    assert not wrong([soak(2_000, tmp_path)])
