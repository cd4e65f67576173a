"""Every cell of the table is the training of one process. ``python -m benchmarks parity`` makes the README's table."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import assert_same_training, chain_and_batches, plan_of, train, trainings
from cells import CELLS, Cell
from ranks import Ranks

from common.errors import PlanError
from parallel.devices import Hardware
from parallel.schedules import SCHEDULES
from parallel.timeline import WORK


def params(device: str):
    return [cell.param for cell in {str(cell): cell for cell in CELLS if cell.device == device}.values()]


def test_every_cell_can_be_planned_slow_ones_too():
    """A change of a model or of the plan's rules that makes a slow cell impossible is seen at once."""
    hardware = {"cpu": Hardware("cpu"), "cuda": Hardware("cuda", 2)}
    chains, impossible = {}, []
    for cell in CELLS:
        recipe = cell.recipe
        built_by = recipe.model, recipe.dropout, recipe.lora
        if built_by not in chains:
            chains[built_by], _ = chain_and_batches(recipe)
        try:
            plan_of(cell.layout, recipe, chains[built_by], hardware=hardware[cell.device])
        except PlanError as error:
            impossible.append(f"{cell}: {error}")
    assert not impossible, "\n".join(impossible)


def assert_it_is_the_wanted_one(cell: Cell, pool: Ranks, trained: dict) -> list:
    """The references are kept (``trained``), for other cells; the training of this cell, of many ranks, is not."""
    reference, *_ = trained[cell.wanted.device](cell.reference, cell.wanted)
    # A comparison of two runs that stand still would say nothing. (The sequential one has new batches at each step.)
    learned = reference.losses[-1] < reference.losses[0] or cell.recipe.model == "sequential"
    if cell.recipe.lora is not None:  # B begins as zeros, so that A has no gradient in the first step
        factors = {name: reference.initial[name] for name in reference.state if ".lora_" in name}
        learned = factors and not any(torch.equal(reference.state[name], factor) for name, factor in factors.items())
    assert learned, "nothing was learned"
    run = pool.run(cell.layout.processes, train, cell.layout, replace(cell.recipe, device=cell.device))
    assert_same_training(run, reference, cell.tolerance, cell.outputs)
    if cell.layout.pipelined:
        assert_all_work_is_noted(cell, run)
    if cell.rounded is not None:
        with pytest.raises(AssertionError, match="farther than"):
            assert_same_training(run, reference, cell.rounded)
    return run


def assert_all_work_is_noted(cell: Cell, run: list) -> None:
    """The timeline has a forward and a backward of each stage and micro-batch, one after the other on a rank."""
    layout, stages = cell.layout, cell.layout.pp * (1 + SCHEDULES[cell.layout.schedule].looped)
    last, pipelines, chunks = stages - 1, layout.dp * layout.ranks_per_stage, layout.chunks
    for step in range(cell.recipe.steps):
        noted = Counter(
            (i.kind.removesuffix("_input"), i.stage, i.microbatch) for result in run for i in result.intervals[step]
        )
        wanted = [(kind, s, m) for kind in ("forward", "backward") for s in range(stages) for m in range(chunks)]
        wanted += [("receive_activation", s, m) for s in range(1, stages) for m in range(chunks)]
        wanted += [("receive_gradient", s, m) for s in range(last) for m in range(chunks)]
        if cell.recipe.lora is not None:  # nothing before it is trained: a stage is sent no gradients
            wanted = [key for key in wanted if key[0] != "receive_gradient" or key in noted]
        late = {key: count for key, count in noted.items() if key[0] == "backward_weight"}
        assert noted == {**dict.fromkeys(wanted, pipelines), **late}
        for result in run:
            begun = {(i.kind.removesuffix("_input"), i.stage, i.microbatch): i.start for i in result.intervals[step]}
            work = [(i.start, i.end) for i in result.intervals[step] if i.kind in WORK]
            assert all(end <= start for (_, end), (start, _) in zip(work, work[1:], strict=False))
            for kind, stage, microbatch, start, end in result.intervals[step]:
                if kind not in WORK:  # it ends as the work begins that it was for
                    user = "forward" if kind == "receive_activation" else "backward"
                    assert start <= end == begun[user, stage, microbatch]


@pytest.mark.parametrize("cell", params("cpu"))
def test_it_is_the_training_of_one_process(ranks, trained, cell):
    assert_it_is_the_wanted_one(cell, ranks, {"cpu": trained})


@pytest.fixture(scope="session")
def trained_on_gpus(gpus):
    return trainings(gpus)


@pytest.mark.parametrize("cell", params("cuda"))
def test_on_pretended_gpus_it_is_the_training_of_one_of_them(gpus, trained, trained_on_gpus, cell):
    for rank, result in enumerate(assert_it_is_the_wanted_one(cell, gpus, {"cpu": trained, "cuda": trained_on_gpus})):
        # A mixture's products need the numbers of tokens of its experts, once in each layer's forward.
        most = 1 + cell.layout.chunks * 6 * (cell.recipe.model == "moe")
        waits = sum(result.waits[-1].values())
        alone = cell.layout.strategy == "data_parallel"
        assert 1 <= waits <= most or alone, f"rank {rank} waited for its GPU: {result.waits}"
        assert all(tensor.dtype.itemsize >= 4 for tensor in result.state.values())
