"""A process apart: its answers, its allocator, its death."""

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks import ranks


class Doubler:
    def __init__(self, rank):
        pass

    def step(self, number):
        return 2.0 * number


class Adder(Doubler):
    """The sum of all ranks' numbers."""

    def __init__(self, rank):
        self.rank = rank

    def step(self, number):
        total = torch.tensor(float(number + self.rank))
        dist.all_reduce(total)
        return total.item()


class AllocatorTold(Doubler):
    """1.0 where the environment tells the allocator something."""

    def step(self, number):
        return float("MALLOC_ARENA_MAX" in os.environ)


class Dying(Doubler):
    def step(self, number):
        os._exit(7)


@pytest.fixture
def apart():
    built = []

    def start(build, **how):
        built.append(ranks.Apart(build, **how))
        return built[-1]

    yield start
    for one in built:
        one.close()


def test_steps_are_answered_one_after_the_other(apart):
    process = apart(Doubler)
    assert [process.step(number) for number in (1, 2, 3)] == [2.0, 4.0, 6.0]


def test_several_processes_take_a_step_together(apart):
    processes = apart(Adder, size=2)
    assert [processes.step(number) for number in (1, 2)] == [3.0, 5.0]


def test_its_allocator_is_as_it_comes_and_ours_stays_as_it_was(apart, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert apart(AllocatorTold, kept=False).step(1) == 0.0
    assert apart(AllocatorTold).step(1) == 1.0
    assert os.environ["MALLOC_ARENA_MAX"] == "1"


def test_its_death_is_an_error_and_not_a_wait(apart):
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        apart(Dying).step(1)


def test_a_step_after_its_death_is_an_error_too(apart):
    process = apart(Doubler)
    process.close()
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        process.step(1)
