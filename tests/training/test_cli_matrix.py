"""`python train.py parallel=…`: the numbers of one process, however the ranks were started."""

import os
import socket

import pytest
from commandline import Started, train

LAYOUTS = {
    "ddp": ["parallel=ddp", "parallel.dp=2", "parallel.chunks=4"],
    "pipelined": ["parallel=pipelined", "parallel.pp=2", "parallel.chunks=8", "parallel.schedule=1f1b"],
    "pipe_ddp": ["parallel=pipe_ddp", "parallel.chunks=4"],
}
SINGLE = ["parallel=single", "parallel.chunks=8"]
PROCESSES = {"ddp": 2, "pipelined": 2, "pipe_ddp": 4}


def assert_same_training(run, reference):
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 5]
    assert run.losses == pytest.approx(reference.losses, rel=1e-5)
    norms, wanted = ([line["grad_norm"] for line in r.steps] for r in (run, reference))
    assert norms == pytest.approx(wanted, rel=1e-4)
    assert [line["step"] for line in run.evaluations] == [2, 4, 5]
    assert run.val_losses == pytest.approx(reference.val_losses, rel=1e-5)
    assert run.summary["test_loss"] == pytest.approx(reference.summary["test_loss"], rel=1e-5)


@pytest.fixture
def single(cli):
    return cli(*SINGLE)


def test_one_process_learns_something_and_clips(single):
    assert single.losses[-1] < single.losses[0] - 0.1
    assert single.steps[0]["grad_norm"] > 0.5


# model_parallel has no launcher: test_resume_layouts and the table of cells have its numbers.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_gives_the_losses_of_one_process(cli, single, layout):
    run = cli(*LAYOUTS[layout])
    assert run.summary["parallel"] == layout
    assert run.summary["world_size"] == PROCESSES[layout]
    assert_same_training(run, single)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# Each rank's C++ side then has something to say, and says who it is.
TALKATIVE = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO"}


def only_folder(cwd):
    """The run directory, made by Hydra under outputs/ as for a user."""
    found = list((cwd / "outputs").glob("*/*"))
    assert len(found) == 1, f"one run, one directory: {found}"
    return found[0]


def test_ranks_that_torchrun_started_train_the_same_in_one_directory(cli, single, tmp_path):
    prefix = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    run = train(
        [*cli.recipe, *LAYOUTS["pipelined"]], tmp_path / "run", prefix=prefix, cwd=tmp_path, own_folder=False
    )
    assert run.code == 0, run.console
    run.folder = only_folder(tmp_path)
    assert_same_training(run, single)
    assert run.summary["world_size"] == 2
    assert run.stdout.count("best validation loss") == 1
    assert run.stderr.count("step 5: val_loss") == 1


@pytest.mark.slow
def test_ranks_started_by_hand_meet_by_their_environment_and_only_rank_0_talks(cli, single, tmp_path):
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        Started(
            [*cli.recipe, *LAYOUTS["ddp"]],
            tmp_path / f"rank{rank}",
            env={**meeting, **TALKATIVE, "RANK": str(rank)},
            cwd=tmp_path,
            own_folder=False,
            fresh=True,  # torch reads TALKATIVE when it is imported
        )
        for rank in (1, 0)  # rank 1 may come first
    ]
    try:
        other, first = (one.wait() for one in started)
    finally:
        for one in started:
            one.kill()
    assert (first.code, other.code) == (0, 0), first.console + other.console
    first.folder = only_folder(tmp_path)
    assert_same_training(first, single)
    assert other.stdout == ""
    assert "step" not in other.stderr
    # What rank 1 had to say once it knew the run directory.
    assert (first.folder / "logs" / "rank_0001.log").read_text() != ""


@pytest.mark.slow
def test_ranks_other_than_0_write_to_their_logs_and_not_to_the_console(tmp_path):
    talk = [f"+parallel.env.{name}={value}" for name, value in TALKATIVE.items()]
    overrides = ["parallel=ddp", "parallel.dp=2", "logger=none", "train.epochs=null", "train.steps=2", *talk]
    run = train(overrides, tmp_path / "run", fresh=True)  # torch reads TALKATIVE when it is imported
    assert run.code == 0, run.console
    assert os.listdir(run.folder / "logs") == ["rank_0001.log"]
    said = [
        line.partition("] ")[2] for line in (run.folder / "logs" / "rank_0001.log").read_text().splitlines()
    ]
    assert any("[Rank 1]" in line or "[rank1]" in line for line in said)
    assert "[Rank 1]" not in run.console and "[rank1]" not in run.console
    assert "[Rank 0]" in run.console or "[rank0]" in run.console, "rank 0 is heard"
