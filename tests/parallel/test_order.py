"""Planned orders, in runs where a forward takes one tick and a backward two, and in runs that take what they take."""

import pytest
import torch
from cases import Layout, Recipe
from orders import interleaved, span
from probes import gradients_of_a_planned_step, operators_of_a_planned_step, orders_of_a_planned_run
from slow_cases import with_slow

from parallel.actions import UNMEASURED, StageSeconds, stage_seconds
from parallel.schedules import ideal_bubble, in_flight
from parallel.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, WORK, Interval
from parallel.zero_bubble.order import best_order

TICK = StageSeconds(1, 2, 1, 1)
SIZES = [(2, 2, 2), (2, 2, 8), (2, 3, 6), (3, 1, 9), (4, 2, 8)]
# Chunks that do not go in rounds of as many as there are ranks, or are fewer.
ODD_SIZES = [(1, 2, 4), (2, 2, 1), (3, 2, 5), (8, 1, 11)]
# ResNet-50's four stages in micro-batches of 20, in milliseconds: nothing is a multiple of anything.
UNEQUAL = [
    StageSeconds(138, 145, 83, 71),
    StageSeconds(141, 218, 128, 103),
    StageSeconds(125, 218, 114, 120),
    StageSeconds(102, 218, 97, 139),
]
# Four stages whose backwards do not pay in two parts, and four whose do.
DEAR, CHEAP = [StageSeconds(1, 2, 2, 2)] * 4, [StageSeconds(1, 2, 0.5, 0.5)] * 4


def apart(orders: dict) -> set[int]:
    """Micro-batches with a backward in two parts somewhere."""
    return {a.microbatch for actions in orders.values() for a in actions if a.kind == BACKWARD_INPUT}


@pytest.mark.parametrize("ranks, per_rank, chunks", SIZES)
def test_a_planned_order_leaves_idle_what_is_ideal_or_a_tick_more_and_less_than_interleaved_1f1b(
    ranks, per_rank, chunks
):
    ticks = [TICK] * (ranks * per_rank)
    takes = span(best_order([UNMEASURED] * (ranks * per_rank), ranks, chunks), ticks)
    work = 3 * per_rank * chunks
    ideal = ideal_bubble("planned", ranks, chunks, per_rank)
    assert ideal - 1e-9 <= 1 - work / takes and takes <= work / (1 - ideal) + 1 + 1e-9
    assert takes < span(interleaved(ranks, per_rank, chunks), ticks)


@pytest.mark.parametrize("chunks", [4, 6, 8])
def test_where_stages_are_unequal_an_order_planned_for_their_times_ends_soonest(chunks):
    planned = span(best_order(UNEQUAL, 2, chunks), UNEQUAL)
    assert planned < 0.99 * span(interleaved(2, 2, chunks), UNEQUAL)
    assert planned <= span(best_order([UNMEASURED] * 4, 2, chunks), UNEQUAL)
    each = [stage.forward + stage.backward for stage in UNEQUAL]
    # At best the second rank waits for its first input, and then no more.
    assert planned < 1.05 * (UNEQUAL[0].forward + chunks * max(each[0] + each[2], each[1] + each[3]))


def test_backwards_stay_whole_where_taking_them_apart_costs_more_than_it_brings():
    assert not apart(best_order(DEAR, 2, 8))
    assert apart(best_order([TICK] * 4, 2, 8))


@pytest.mark.parametrize("ranks, per_rank, chunks", [*SIZES, *ODD_SIZES])
@pytest.mark.parametrize("seconds", [TICK, StageSeconds(3, 4, 2.5, 2)], ids=["ticks", "other times"])
def test_every_gradient_is_taken_once_in_the_order_of_micro_batches_and_only_the_last_are_taken_apart(
    ranks, per_rank, chunks, seconds
):
    orders = best_order([seconds] * (ranks * per_rank), ranks, chunks)
    assert span(orders, [TICK] * (ranks * per_rank)) >= 3 * per_rank * chunks, "it can be run to its end"
    two_parts = apart(orders)
    assert two_parts == set(range(chunks - len(two_parts), chunks))
    for rank, actions in orders.items():
        every = [(rank + ranks * i, chunk) for i in range(per_rank) for chunk in range(chunks)]
        split = [(stage, chunk) for stage, chunk in every if stage > 0 and chunk in two_parts]
        done = {kind: [] for kind in WORK}
        for action in actions:
            done[action.kind].append((action.stage, action.microbatch))
        assert sorted(done[FORWARD]) == every
        assert sorted(done[BACKWARD]) == sorted(set(every) - set(split))
        assert sorted(done[BACKWARD_INPUT]) == sorted(done[BACKWARD_WEIGHT]) == split
        for stage in range(rank, ranks * per_rank, ranks):  # so that sums of gradients are the same, bit for bit
            gradients = [a.microbatch for a in actions if a.stage == stage and a.kind in (BACKWARD, BACKWARD_WEIGHT)]
            assert gradients == sorted(gradients)


def max_in_flight(actions: list) -> int:
    """Forwards whose activations some gradient still needs, of all stages of a rank."""
    held, most = 0, 0
    for action in actions:
        held += {FORWARD: 1, BACKWARD_INPUT: 0}.get(action.kind, -1)
        most = max(most, held)
    return most


@pytest.mark.parametrize("ranks, per_rank, chunks", [*SIZES, (4, 2, 16)])
def test_a_rank_holds_no_more_activations_than_is_said_of_it(ranks, per_rank, chunks):
    held = {name: [per_rank * in_flight(name, ranks, chunks, per_rank, rank) for rank in range(ranks)]
            for name in ("planned", "interleaved_1f1b")}  # fmt: skip
    for rank, actions in best_order([TICK] * (ranks * per_rank), ranks, chunks).items():
        assert max_in_flight(actions) <= held["planned"][rank]
    for rank, actions in interleaved(ranks, per_rank, chunks).items():
        assert max_in_flight(actions) <= held["interleaved_1f1b"][rank]


def test_what_a_stage_takes_is_the_least_of_the_steps_after_the_warm_up():
    def step(forward, backward):
        return [
            Interval("forward", 1, 0, 0.0, forward),
            Interval("receive_gradient", 1, 0, 0.0, 9.0),
            Interval("backward", 1, 0, 10.0, 10.0 + backward),
        ]

    steps = [step(0.5, 0.5), step(0.5, 0.5), step(2.0, 5.0), step(3.0, 4.0), step(9.0, 3.0)]
    times = stage_seconds(steps)[1]
    assert (times.forward, times.backward) == (2.0, 3.0)
    assert times.inputs + times.weights == pytest.approx(3.0 * 1.025)  # never seen in two parts: estimated


def test_a_run_plans_anew_from_what_its_first_steps_took_and_all_ranks_agree(ranks):
    layout = Layout("pipelined", pp=2, chunks=6, schedule="planned", balance=(1, 1, 1, 4))
    seen = ranks.run(2, orders_of_a_planned_run, layout, Recipe("classifier", global_batch=12, lr=0.1))
    assert seen[0] == seen[1]
    first, second, *_, last = seen[0]
    assert first == second and first != last


@pytest.mark.parametrize("model", with_slow(["gpt2", "resnet50"], ["resnet50"]))
def test_gradients_are_the_same_bit_for_bit_in_whatever_order(ranks, model):
    """A run that goes on from a checkpoint plans its order anew."""
    layout = Layout("pipelined", pp=2, chunks=4, schedule="planned")
    recipe = Recipe(model, global_batch=8, lr=0.1)
    assert apart(best_order(DEAR, 2, 4)) != apart(best_order(CHEAP, 2, 4))
    whole = ranks.run(2, gradients_of_a_planned_step, layout, recipe, DEAR)
    two_parts = ranks.run(2, gradients_of_a_planned_step, layout, recipe, CHEAP)
    for one, other in zip(whole, two_parts, strict=True):
        assert one and all(torch.equal(one[name], other[name]) for name in one)


def test_a_backward_in_two_parts_does_norms_and_activations_once(ranks):
    layout = Layout("pipelined", pp=2, chunks=4, schedule="planned")
    recipe = Recipe("resnet50", global_batch=8, lr=0.1)
    whole = ranks.run(2, operators_of_a_planned_step, layout, recipe, DEAR)
    two_parts = ranks.run(2, operators_of_a_planned_step, layout, recipe, CHEAP)
    norms, relus = "aten::native_batch_norm_backward", "aten::threshold_backward"
    for one, other in zip(whole, two_parts, strict=True):
        assert one[norms] > 0 and one[relus] > 0
        assert (other[norms], other[relus]) == (one[norms], one[relus])
        assert other["aten::convolution_backward"] > one["aten::convolution_backward"]  # those, once for each part
