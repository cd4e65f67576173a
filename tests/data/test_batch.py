"""What one replica gets for one step."""

import pytest
import torch

from data.dataset import Batch


def test_chunks_are_equal_and_in_order():
    batch = Batch(torch.arange(12).view(6, 2), torch.arange(6), torch.tensor([1.0, 1, 1, 1, 1, 0]))
    chunks = batch.chunks(3)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert torch.equal(torch.cat([chunk.inputs for chunk in chunks]), batch.inputs)
    assert torch.equal(torch.cat([chunk.targets for chunk in chunks]), batch.targets)
    assert chunks[2].weights.tolist() == [1, 0]
    assert Batch(batch.inputs, batch.targets).chunks(2)[1].weights is None


@pytest.mark.parametrize("n", [0, 4, 12])
def test_a_batch_that_cannot_be_cut_equally_is_an_error_with_the_numbers(n):
    with pytest.raises(ValueError, match=f"6 samples cannot be cut into {n} "):
        Batch(torch.zeros(6, 1), torch.zeros(6)).chunks(n)


def test_moving_a_batch_moves_all_of_it():
    moved = Batch(torch.zeros(2, 1), torch.zeros(2), torch.ones(2)).to("meta")
    assert {moved.inputs.device.type, moved.targets.device.type, moved.weights.device.type} == {"meta"}
