"""Seconds measured on this machine: their shape, what they grow with, and what a layout's step is made of them."""

from functools import partial

import pytest
import torch
from composed import compose, plain
from torch import nn

from data.dataset import Batch
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from planner import here
from planner.balance import time_layers
from planner.costs import MeasuredCosts
from planner.here import Curve, Here, LayerSeconds, Line, Subject, measure
from planner.layout import PlannedLayout
from planner.step import seconds_of
from planner.work import LayerWork

WIDTH = 256
SIZES = 16, 2048
NAMES = ("first", "second", "last")


class Counting:
    """An optimizer that writes how many process groups there are when it is made."""

    def __init__(self, file, strategy) -> None:
        self.optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        with open(file, "a") as counts:
            counts.write(f"{len(torch.distributed.distributed_c10d._world.pg_map)}\n")

    def train(self) -> None:
        self.training = True

    def step(self, lr: float) -> None:
        assert self.training
        self.optimizer.step()


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    return tmp_path_factory.mktemp("groups") / "counts"


@pytest.fixture(scope="module")
def subject(counts) -> Subject:
    optimizer = partial(Counting, counts)
    chain = Chain([LayerSpec(name, partial(nn.Linear, WIDTH, WIDTH)) for name in NAMES], loss=SquaredError())
    sample = Batch(torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    parallel = plain(compose("parallel=single", "parallel.threads=1")).parallel
    return Subject(parallel, "cpu", "fp32", chain, sample, optimizer, hurry)


def hurry(world):
    """Called in the processes that measure, before they do: less and smaller sizes, as only their order counts."""
    here._SIZES, here._STEPS_S, here._NUMBERS, here._ROUNDS, here._LEAST_S = 2, 0.02, (2**8, 2**18), 1, 0.005


@pytest.fixture(scope="module")
def alone(subject) -> Here:
    state, threads = torch.default_generator.get_state(), torch.get_num_threads()
    found = measure(subject, 1, *SIZES)
    assert torch.equal(torch.default_generator.get_state(), state) and torch.get_num_threads() == threads
    return found


@pytest.fixture(scope="module")
def both(subject) -> Here:
    return measure(subject, 2, *SIZES)


def test_every_layer_has_seconds_that_grow_with_the_samples(alone, both):
    for found in (alone, both):
        assert tuple(layer.name for layer in found.layers) == NAMES
        for layer in found.layers:
            for line in (layer.forward, layer.backward, layer.first, layer.alone):
                assert 0 < line(SIZES[0]) <= line(SIZES[1]) < 2.0


def test_one_process_communicates_with_nobody_and_two_do(alone, both):
    assert alone.replicas == alone.shards == Line() and not alone.messages
    assert both.messages.keys() == {"gpipe", "1f1b", "interleaved_1f1b"}
    # Differences of two measurements: on a busy machine some of them may vanish, but not all.
    assert alone.step + both.step > 0
    assert sum(of(2**22) for of in (both.replicas, both.shards, *both.messages.values())) > 0


def test_each_layout_that_was_measured_leaves_its_process_groups(both, counts):
    found = [int(line) for line in counts.read_text().split()]
    assert len(found) > 20 and 1 < max(found) <= 3, found  # all ranks, and those of the layout


def test_an_update_takes_longer_for_more_parameters_and_a_process_has_some_memory(alone):
    assert 0 < alone.update(2**10) < alone.update(2**24)
    assert 2**26 < alone.process < 2**31


def test_a_line_goes_through_two_points_and_never_below_zero():
    line = Line.through((1, 3), (5.0, 9.0))
    assert line(0) == pytest.approx(3.0) and line(2) == pytest.approx(7.0)
    disturbed = Line.through((1, 4), (2.0, 1.0))  # a smaller size takes no longer than a larger one
    assert disturbed(1) == disturbed(4) == pytest.approx(1.0)
    assert Line.through((1, 4), (1.0, 8.0)).fixed == 0


def test_a_curve_goes_through_what_was_measured_and_beyond_it_in_proportion():
    curve = Curve((1, 4), (2.0, 5.0))
    assert [curve(size) for size in (1, 2, 4, 8)] == pytest.approx([2.0, 3.0, 5.0, 10.0])


def made_up(processes: int, alone: float, at_once: int = 2) -> Here:
    """Return layers of 1 s forward and 2 s backward while two processes compute."""
    layers = tuple(LayerSeconds(n, Line(1.0), Line(2.0), Line(3.5), Line(alone)) for n in ("a", "b"))
    messages = {"gpipe": Line(0.8), "1f1b": Line(0.4), "interleaved_1f1b": Line(0.2)}
    return Here(processes, at_once, layers, step=0.1, update=Line(0.05), replicas=Line(0.3, 0.1), messages=messages)


SLOWER = 1.1  # layers in turn on a CPU, by what each takes alone
WORKS = [LayerWork(name, 1.0, 0.0, 1, 0.0, 10, 4.0, 4.0) for name in ("a", "b")]


def test_a_step_of_one_process_is_its_layers_its_update_and_what_is_left():
    one = seconds_of(WORKS, PlannedLayout(chunks=3), MeasuredCosts(made_up(1, 3.0, at_once=1), "fp32", on_gpus=False))
    assert (one.compute, one.optimizer) == (pytest.approx(SLOWER * (3 * 6.0 + 2 * 0.5)), pytest.approx(0.15))
    assert one.total == pytest.approx(one.compute + one.optimizer)
    hot = seconds_of(WORKS, PlannedLayout(chunks=3), MeasuredCosts(made_up(1, 3.0, at_once=1), "fp32", on_gpus=True))
    assert hot.compute == pytest.approx(one.compute / SLOWER)


def test_replicas_add_what_was_measured_and_hide_nothing_on_a_cpu():
    costs = MeasuredCosts(made_up(2, 1.5), "fp32", on_gpus=False)
    one = seconds_of(WORKS, PlannedLayout("ddp", dp=2), costs)
    assert one.gradients == pytest.approx(0.1 * 4 * 20) and one.optimizer == pytest.approx(0.05 + 0.1 + 0.3)
    hidden = seconds_of(WORKS, PlannedLayout("ddp", dp=2), MeasuredCosts(made_up(2, 1.5), "fp32", on_gpus=True))
    assert hidden.gradients < one.gradients


def test_a_byte_of_any_collective_takes_as_long_as_that_of_gradients():
    costs = MeasuredCosts(made_up(2, 1.5), "fp32", on_gpus=False)
    seconds = {kind: costs.collective(kind, 6.0, 2, 2) for kind in ("all_reduce", "all_gather", "all_to_all", "ring")}
    assert seconds == pytest.approx({"all_reduce": 0.6, "all_gather": 0.3, "all_to_all": 0.3, "ring": 0.6})


def test_a_process_that_waits_slows_nobody_down_and_more_than_the_cores_take_turns():
    costs = MeasuredCosts(made_up(4, 1.5), "fp32", on_gpus=False)
    busy = {0.5: 0.5, 1: 0.5, 1.5: 0.75, 2: 1.0, 3: 1.5, 4: 2.0}
    assert {count: costs.slowed(count, 1) for count in busy} == pytest.approx(busy)
    costs.here.messages["gpipe"] = Line()
    one = seconds_of(WORKS, PlannedLayout("pipelined", pp=2, chunks=2, schedule="gpipe"), costs)
    part = costs.slowed(2 * 6.0 / 9.0, 1)  # of 2 stages with 2 micro-batches of 3 s each one and a third compute
    # The first micro-batch takes half a second more in each of them.
    assert one.compute + one.bubble == pytest.approx(SLOWER * part * (9.0 + 2 * 0.5))
    replicas = seconds_of(WORKS, PlannedLayout("ddp", dp=4), costs)
    assert replicas.compute == pytest.approx(SLOWER * 2.0 * 7.0)


def test_a_message_takes_what_was_measured_with_its_schedule():
    costs = MeasuredCosts(made_up(2, 1.5), "fp32", on_gpus=False)
    one_way = {"gpipe": 0.8, "1f1b": 0.4, "interleaved_1f1b": 0.2, "interleaved_zero_bubble": 0.2}
    for schedule, seconds in one_way.items():
        assert costs.message(8.0, True, schedule) == seconds
    plain, looped = (
        seconds_of(
            WORKS * per_rank, PlannedLayout("pipelined", pp=2, chunks=4, schedule=name, stages_per_rank=per_rank), costs
        ).stages
        for name, per_rank in (("1f1b", 1), ("interleaved_1f1b", 2))
    )
    # A half of each message that comes or goes, forward and back: one beside a rank's only stage, three beside two.
    assert (plain, looped) == (pytest.approx(4 * 0.4), pytest.approx(4 * 3 * 0.2))


def test_layers_that_are_built_alike_are_measured_once(subject):
    build, waits = partial(nn.Linear, WIDTH, WIDTH), []
    chain = Chain([LayerSpec(name, build) for name in ("a", "b", "c", "d")], loss=SquaredError())
    times = time_layers("fp32", chain, subject.sample, 0, wait=lambda: waits.append(None))
    # The first has an input without a gradient, the last one the loss.
    assert len(times) == 4 and times[1] == times[2] and len(waits) == 3
