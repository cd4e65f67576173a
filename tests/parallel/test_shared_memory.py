"""Neighbours on one machine hand tensors over by shared memory, as well as torch's sends and receives do."""

from __future__ import annotations

import sys
from threading import Timer

import pytest
import torch
from cases import Layout, Recipe
from probes import boxes_of_stages, gradients_by_memory_and_by_network, pipes_of_a_strategy

from parallel.shared_memory import Inbox, Outbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memfd_create and /proc")

TOY = Recipe("toy", 32, lr=0.1)
ACTIVATION, GRADIENT = "receive_activation", "receive_gradient"


@pytest.fixture
def ends():
    inbox = Inbox(slots=3, size=24, sender="rank 7")
    outbox = Outbox(inbox.address, slots=3, size=24)
    inbox.close_sender()
    yield inbox, outbox
    inbox.close()
    outbox.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_what_is_put_is_there_whatever_its_type_and_in_whatever_order_it_is_used(ends, dtype):
    inbox, outbox = ends
    shape = (3, 24 // 3 // dtype.itemsize)
    sent = [torch.arange(24 // dtype.itemsize).view(shape).to(dtype) + number for number in range(3)]
    for number in (2, 0, 1):
        outbox.put(number, sent[number])
    for number in (1, 2, 0):
        inbox.wait(number, "input", timeout_s=5)
        assert torch.equal(inbox.slot(number, like=torch.empty(shape, dtype=dtype)), sent[number])


def test_a_transposed_tensor_with_a_gradient_arrives_by_its_values(ends):
    inbox, outbox = ends
    sent = torch.randn(3, 2, requires_grad=True).t()
    outbox.put(0, sent)
    inbox.wait(0, "input", timeout_s=5)
    slot = inbox.slot(0, like=torch.empty(2, 3))
    assert torch.equal(slot, sent) and not slot.requires_grad


def test_a_receiver_waits_for_its_own_number(ends):
    inbox, outbox = ends
    outbox.put(1, torch.ones(6))
    Timer(0.3, outbox.put, (2, torch.full((6,), 2.0))).start()
    inbox.wait(2, "input", timeout_s=5)
    assert inbox.slot(2, like=torch.empty(6))[0] == 2


def test_each_put_is_waited_for_once(ends):
    inbox, outbox = ends
    outbox.put(0, torch.ones(6))
    inbox.wait(0, "input", timeout_s=5)
    with pytest.raises(ConnectionError, match="waited 0.1 s for the input, which rank 7 has not sent"):
        inbox.wait(0, "input", timeout_s=0.1)


def test_a_sender_that_has_gone_is_named_at_once(ends):
    inbox, outbox = ends
    outbox.put(0, torch.ones(6))
    outbox.close()
    inbox.wait(0, "input", timeout_s=60)  # was sent before
    with pytest.raises(ConnectionResetError, match="rank 7 has gone before it sent the gradient"):
        inbox.wait(1, "gradient", timeout_s=60)


def test_a_receiver_that_has_gone_is_an_error_for_the_sender(ends):
    inbox, outbox = ends
    inbox.close()
    with pytest.raises(BrokenPipeError):
        outbox.put(0, torch.ones(6))


def test_another_machine_s_address_is_refused():
    """Where the same numbers may stand for something else."""
    inbox = Inbox(slots=1, size=8, sender="rank 0")
    with pytest.raises(OSError, match="is something else"):
        Outbox(inbox.address._replace(name="of-another-machine"), slots=1, size=8)
    with pytest.raises(OSError):
        Outbox(inbox.address._replace(process=2**22 + 1), slots=1, size=8)
    inbox.close()


@pytest.mark.parametrize("layout", [
    Layout("pipelined", pp=4, chunks=4, schedule="1f1b"),
    Layout("pipelined", pp=2, chunks=4, schedule="planned"),
    Layout("pipe_ddp", dp=2, pp=2, chunks=2, order="pp_dp"),
], ids=str)  # fmt: skip
def test_all_that_neighbours_exchange_goes_by_shared_memory(ranks, layout):
    recipe = Recipe("transformer", 16, lr=0.1)
    stages = 4 if layout.schedule != "gpipe" else 2
    for boxes in ranks.run(layout.ranks, boxes_of_stages, layout, recipe):
        for stage, (received, sent) in boxes.items():
            assert received == ({ACTIVATION} if stage > 0 else set()) | ({GRADIENT} if stage < stages - 1 else set())
            assert sent == ({ACTIVATION} if stage < stages - 1 else set()) | ({GRADIENT} if stage > 0 else set())


@pytest.mark.parametrize("layout, model", [
    (Layout("pipelined", pp=2, chunks=4), "resnet50"),
    (Layout("pipelined", pp=3, chunks=4, schedule="1f1b"), "transformer"),
    (Layout("pipelined", pp=2, chunks=4, schedule="interleaved_zero_bubble"), "gpt2"),
    (Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b"), "convnet"),
], ids=str)  # fmt: skip
def test_gradients_are_the_same_bit_for_bit_as_through_torch(ranks, layout, model):
    recipe = Recipe(model, 8, lr=0.1)
    for by_memory, *by_network in ranks.run(layout.ranks, gradients_by_memory_and_by_network, layout, recipe):
        for other in by_network:
            assert by_memory.keys() == other.keys()
            for name, gradient in by_memory.items():
                assert torch.equal(gradient, other[name]), name


def test_a_closed_strategy_leaves_no_pipe_and_no_memory_open(ranks):
    for during, after in ranks.run(2, pipes_of_a_strategy, Layout("pipelined", pp=2, chunks=2), TOY):
        assert (during, after) == (4, 0)  # a pipe and memory to receive by, and to send by
