"""Worker processes: their answers, their allocator, their death."""

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks import ranks


class Doubler:
    def __init__(self, rank):
        self.rank = rank

    def step(self, number):
        return 2.0 * number


class Adder(Doubler):
    def step(self, number):
        total = torch.tensor(float(number + self.rank))
        dist.all_reduce(total)
        return total.item()


class AllocatorSettings(Doubler):
    def step(self, number):
        return "MALLOC_ARENA_MAX" in os.environ


class Dying(Doubler):
    def step(self, number):
        os._exit(7)


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


@pytest.mark.parametrize("build, size, answers", [(Doubler, 1, [2.0, 4.0, 6.0]), (Adder, 2, [3.0, 5.0, 7.0])])
def test_steps_are_answered_one_after_the_other_by_one_process_or_several(workers, build, size, answers):
    started = workers(build, size=size)
    assert [started.step(number) for number in (1, 2, 3)] == answers


def test_the_allocator_has_its_defaults_if_asked_and_ours_is_unchanged(workers, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not workers(AllocatorSettings, keep_memory=False).step(1)
    assert workers(AllocatorSettings).step(1)
    assert os.environ["MALLOC_ARENA_MAX"] == "1"


def test_a_worker_s_death_is_an_error_at_its_step_and_at_the_next(workers):
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        workers(Dying).step(1)
    closed = workers(Doubler)
    closed.close()
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        closed.step(1)


def test_an_exception_on_one_rank_ends_the_call(capfd):
    with pytest.raises(RuntimeError, match="died with exit code 1"):
        ranks.run(one_rank_fails)
    assert "this is shown on standard error" in capfd.readouterr().err
