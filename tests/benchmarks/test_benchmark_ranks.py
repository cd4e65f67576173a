"""Worker processes: their answers, their allocator, their death."""

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks import ranks


class Adder:
    """Answers what all ranks add up, and whether its allocator has settings of ours."""

    def __init__(self, rank):
        self.rank = rank

    def step(self, number):
        if number == "dies":
            os._exit(7)
        total = torch.tensor(float(number + self.rank))
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item(), "MALLOC_ARENA_MAX" in os.environ


def one_rank_fails(rank):
    if rank == 1:
        raise ValueError("this is shown on standard error")
    dist.barrier()


@pytest.fixture
def workers():
    started = []

    def start(build, **options):
        started.append(ranks.Workers(build, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_steps_are_answered_one_after_the_other_by_several_processes(workers):
    started = workers(Adder, size=2)
    assert [started.step(number)[0] for number in (1, 2, 3)] == [3.0, 5.0, 7.0]


def test_an_exception_on_one_rank_ends_the_call(capfd):
    with pytest.raises(RuntimeError, match="died with exit code 1"):
        ranks.run(one_rank_fails)
    assert "this is shown on standard error" in capfd.readouterr().err


@pytest.mark.slow
def test_one_process_answers_with_allocator_settings_unless_asked_and_its_death_is_an_error(workers, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    plain = workers(Adder, keep_memory=False)
    assert plain.step(1) == (1.0, False)
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        plain.step("dies")
    kept = workers(Adder)
    assert [kept.step(number) for number in (1, 2)] == [(1.0, True), (2.0, True)]
    assert os.environ["MALLOC_ARENA_MAX"] == "1", "ours is unchanged"
    kept.close()
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        kept.step(3)
