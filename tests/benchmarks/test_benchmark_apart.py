"""A process apart: its answers, its allocator, its death."""

import os

import pytest

from benchmarks import ranks


class Doubler:
    def step(self, number):
        return 2.0 * number


class AllocatorTold:
    """1.0 where the environment tells the allocator something."""

    def step(self, number):
        return float("MALLOC_ARENA_MAX" in os.environ)


class Dying:
    def step(self, number):
        os._exit(7)


@pytest.fixture
def apart():
    built = []

    def start(build):
        built.append(ranks.Apart(build))
        return built[-1]

    yield start
    for one in built:
        one.close()


def test_steps_are_answered_one_after_the_other(apart):
    process = apart(Doubler)
    assert [process.step(number) for number in (1, 2, 3)] == [2.0, 4.0, 6.0]


def test_its_allocator_is_as_it_comes_and_ours_stays_as_it_was(apart, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert apart(AllocatorTold).step(1) == 0.0
    assert os.environ["MALLOC_ARENA_MAX"] == "1"


def test_its_death_is_an_error_and_not_a_wait(apart):
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        apart(Dying).step(1)


def test_a_step_after_its_death_is_an_error_too(apart):
    process = apart(Doubler)
    process.close()
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        process.step(1)
