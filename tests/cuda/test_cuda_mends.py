"""What no CPU run would show: devices, streams, contexts, and what makes the host wait."""

import dataclasses

import gpu_cases
import pytest
import torch
from cells import PUBLISHED, on_gpus
from slow_cases import with_slow

GPT2 = on_gpus("gpt2")


@pytest.mark.parametrize("model", with_slow(PUBLISHED, {*PUBLISHED} - {"gpt2"}))
def test_a_trace_for_a_gpu_has_the_shapes_and_dtypes_of_one_for_a_cpu(gpus, model):
    recipe = dataclasses.replace(on_gpus(model), device="cpu", precision="bf16")
    (on_cuda,), on_cpu = gpus.run(1, gpu_cases.borders, recipe, "cuda"), gpu_cases.borders(recipe, "cpu")
    assert on_cuda == on_cpu


def test_a_resumed_update_does_not_wait_for_the_gpus(gpus):
    ((plain, resumed),) = gpus.run(1, gpu_cases.waits_of_an_update_after_a_resume, GPT2)
    assert resumed == plain == {}


def test_data_parallel_seeds_each_gpu(gpus):
    ((first, second),) = gpus.run(1, gpu_cases.generators_seeded, GPT2)
    assert first == second > 0


def test_what_a_layer_draws_on_the_host_is_the_same_whenever_it_is_drawn(gpus):
    """A layer left out in the forward and not in its recomputation would have the gradient of another model."""
    (first,), (again,) = (gpus.run(1, gpu_cases.gradients_of_layer_drop, recompute) for recompute in (False, True))
    assert all(map(torch.equal, first, again))


def test_a_backward_does_not_wait_for_gradients_that_are_reduced_in_groups(gpus):
    for seen in gpus.run(2, gpu_cases.streams_of_a_hierarchy, GPT2):
        assert len(seen) >= 2 and set(seen) == {(False, True)}


def test_peak_memory_is_that_of_all_gpus_of_a_process(gpus):
    ((counted, of_each),) = gpus.run(1, gpu_cases.peaks, GPT2)
    assert counted == of_each


@pytest.mark.slow
def test_ranks_that_share_a_gpu_exchange_its_tensors(environment):
    from ranks import Ranks

    pool = Ranks(2, environment, "host")
    try:
        answers = pool.run(2, gpu_cases.exchange)
    finally:
        pool.close()
    for rank, (total, *parts, whole, part, sent, received) in enumerate(answers):
        assert total == [3.0] * 3
        assert parts == [[1.0] * 3, [2.0] * 3] and whole == [1.0] * 3 + [2.0] * 3
        assert part == [2.0 * (rank + 1)] * 3
        assert sent == [7.0] * 3
        assert received == [2.0 - rank] * 3
