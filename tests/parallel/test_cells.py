"""Every cell of the table is the training of one process. ``python -m benchmarks parity`` makes the README's table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import trainings
from cells import CELLS, Cell
from comparing import assert_same_training


def params(device: str):
    return [cell.param for cell in {str(cell): cell for cell in CELLS if cell.device == device}.values()]


def assert_it_is_the_wanted_one(cell: Cell, trained: dict) -> None:
    (reference,) = trained[cell.wanted.device](cell.reference, cell.wanted)
    # A comparison of two runs that stand still would say nothing. (The sequential one has new batches at each step.)
    assert reference.losses[-1] < reference.losses[0] or cell.recipe.model == "sequential", "nothing was learned"
    run = trained[cell.device](cell.layout, replace(cell.recipe, device=cell.device))
    assert_same_training(run, reference, cell.tolerance)
    for rank, result in enumerate(run if cell.device == "cuda" else ()):
        assert sum(result.waits[-1].values()) == 1, f"rank {rank} waited for its GPU: {result.waits}"
    if cell.rounded is not None:
        with pytest.raises(AssertionError, match="farther than"):
            assert_same_training(run, reference, cell.rounded)


@pytest.mark.parametrize("cell", params("cpu"))
def test_it_is_the_training_of_one_process(trained, cell):
    assert_it_is_the_wanted_one(cell, {"cpu": trained})


@pytest.fixture(scope="session")
def trained_on_gpus(gpus):
    return trainings(gpus)


@pytest.mark.parametrize("cell", params("cuda"))
def test_on_pretended_gpus_it_is_the_training_of_one_of_them(trained, trained_on_gpus, cell):
    assert_it_is_the_wanted_one(cell, {"cpu": trained, "cuda": trained_on_gpus})
