"""What parity (``test_cells``) rests on: its mistakes are seen, and padding, half precision and recomputation."""

import dataclasses
import math

import pytest
import torch
from cases import Layout, Recipe, assert_same_training, weights_of
from cells import RECIPES
from probes import in_bf16
from slow_cases import slow
from small_models import VOCABULARY, chain_and_batches

TOLERANCE = 1e-5  # relative, in float32

SINGLE = Layout("single")
PIPE_DDP = Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule="1f1b")
TWO_PARTS = Layout("pipelined", pp=2, chunks=4, schedule="interleaved_zero_bubble")
TOY, GPT2 = RECIPES["toy"], RECIPES["gpt2"]


@pytest.mark.parametrize(
    "layout", [SINGLE, Layout("ddp", dp=2, chunks=4), Layout("pipe_ddp", dp=2, pp=2, chunks=4)], ids=str
)
def test_a_training_batch_with_padding_divides_by_what_counts(trained, layout):
    """The padded sample is one replica's: a mean of the replicas' means would be wrong."""
    (reference,) = trained(SINGLE, dataclasses.replace(GPT2, cut=True, steps=5))
    assert_same_training(trained(layout, dataclasses.replace(GPT2, padded=True, steps=5)), reference, TOLERANCE)


def test_an_evaluation_counts_every_sample_once_and_leaves_the_training_as_it_was(trained):
    undisturbed = trained(PIPE_DDP, dataclasses.replace(GPT2, eval_every=None))
    disturbed = trained(PIPE_DDP, GPT2)
    for result in disturbed:
        assert [count for _, count in result.evaluations] == [(16 - 1) * 32]
    assert_same_bits(disturbed, undisturbed)


def test_a_weight_that_is_a_little_off_is_seen(trained):
    (reference,) = trained(SINGLE, TOY)
    for name, tensor in reference.state.items():
        wrong = dataclasses.replace(reference, state={**reference.state, name: 1.0001 * tensor})
        with pytest.raises(AssertionError, match=f"farther than 1e-05 from single, relative: {{'{name}'"):
            assert_same_training([wrong], reference, TOLERANCE)


def test_the_ranks_of_a_replica_hold_every_layer_once_and_one_more_copy_of_the_tied_weight(trained):
    chain, _ = chain_and_batches(GPT2)
    model, tied = sum(p.numel() for p in chain.skeleton().parameters()), VOCABULARY * 64
    run = trained(PIPE_DDP, GPT2)
    for replica in run[:2], run[2:]:
        assert sum(result.parameters for result in replica) == model + tied
        assert all(result.parameters < model for result in replica)
        assert [name for result in replica for name in result.layers] == [*chain.names]
        for result in replica:
            assert all(name.startswith(tuple(f"{layer}." for layer in result.layers)) for name in result.state)


@pytest.mark.parametrize(
    "model, layout",
    [("gpt2", Layout("single", chunks=8)), ("gpt2", PIPE_DDP), slow("unet", TWO_PARTS), slow("translator", TWO_PARTS)],
    ids=str,
)
def test_activation_recomputation_gives_the_same_bits(trained, model, layout):
    recipe = RECIPES[model]
    assert_same_bits(trained(layout, dataclasses.replace(recipe, recompute=True)), trained(layout, recipe))


@pytest.mark.parametrize(
    "model, precision, layout",
    [
        ("gpt2", "bf16", PIPE_DDP),
        slow("gpt2", "fp16", PIPE_DDP),
        slow("gpt2", "bf16_residual", PIPE_DDP),
        slow("gpt2", "bf16_residual", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="1f1b")),
        slow("translator", "bf16", Layout("pipelined", pp=2, chunks=4, schedule="1f1b")),
        # A cast that autocast keeps from the first micro-batch would get its gradient after its layer was reduced.
        slow("gpt2", "bf16", Layout("fsdp", dp=2, chunks=4)),
        ("gpt2", "bf16", Layout("fsdp", dp=2, chunks=4, reshard=False)),
        slow("gpt2", "bf16", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="interleaved_zero_bubble")),
    ],
    ids=str,
)
def test_the_first_half_precision_step_is_as_exact_as_in_float32(trained, model, precision, layout):
    """Equal weights and micro-batches pass through the same arithmetic; only the float32 sums have another order."""
    recipe = dataclasses.replace(RECIPES[model], precision=precision, steps=1, eval_every=1)
    (reference,) = trained(layout.same_cut, recipe)
    (in_float32,) = trained(layout.same_cut, dataclasses.replace(recipe, precision="fp32"))
    assert reference.losses != in_float32.losses, "autocast was not at work"
    assert reference.losses == pytest.approx(in_float32.losses, rel=1e-2)
    run = trained(layout, recipe)
    assert run[0].losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert run[0].norms == pytest.approx(reference.norms, rel=TOLERANCE)
    if model == "gpt2" and layout is PIPE_DDP:
        assert_close(weights_of(run), reference.state, TOLERANCE)
    assert all(tensor.dtype == reference.state[name].dtype for name, tensor in weights_of(run).items())


@pytest.mark.parametrize(
    "layout",
    [
        slow(Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule="1f1b")),
        slow(Layout("fsdp", dp=2, chunks=4)),
        Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="interleaved_zero_bubble"),
    ],
    ids=str,
)
def test_frozen_weights_that_are_cast_twice_give_the_same_in_every_layout(trained, layout):
    recipe = dataclasses.replace(GPT2, precision="bf16", lora=("c_attn",), steps=2, eval_every=2)
    (reference,) = trained(layout.same_cut, recipe)
    run = trained(layout, recipe)
    assert run[0].losses == pytest.approx(reference.losses, rel=1e-4)
    assert run[0].norms[0] == pytest.approx(reference.norms[0], rel=TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [Layout("single"), Layout("pipelined", pp=2), Layout("pipelined", pp=2, schedule="planned", stages_per_rank=1)],
    ids=str,
)
def test_a_layer_that_keeps_itself_in_float32_gets_gradients_with_float32_s_digits(ranks, layout):
    island = Recipe("island", global_batch=16, lr=0.02, precision="bf16")
    short = {}
    for of_rank in ranks.run(layout.processes, in_bf16, island, layout):
        short |= of_rank
    assert short == {f"{i}.{kind}": i != 1 for i in range(3) for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    "precision, loss, weights", [("bf16", 1e-3, 5e-2), slow("bf16_residual", 2e-3, 5e-2), slow("fp16", 1e-4, 5e-3)]
)
def test_half_precision_steps_drift_by_rounding_only(trained, precision, loss, weights):
    """A weight that differs by float32's 1e-7 is at times cast to the next number of the half format, 2^-8 away in
    bf16 and 2^-11 in fp16. Seen in every layout, without dropout too: losses 2e-4 apart in bf16 and 2e-5 in fp16,
    weights 1e-2 and 1e-3 (the last norm's bias, which is small)."""
    recipe = dataclasses.replace(GPT2, precision=precision)
    (reference,) = trained(PIPE_DDP.same_cut, recipe)
    run = trained(PIPE_DDP, recipe)
    assert all(reference.finite)
    assert all(result.losses == run[0].losses for result in run)
    assert run[0].losses == pytest.approx(reference.losses, rel=loss)
    assert_close(weights_of(run), reference.state, weights)


@pytest.mark.parametrize("layout", [Layout("ddp", dp=2, chunks=4), Layout("pipe_ddp", dp=2, pp=2, chunks=4)], ids=str)
def test_an_overflow_on_one_stage_halves_the_loss_scale_and_skips_the_step_on_every_rank(trained, layout):
    recipe = dataclasses.replace(GPT2, precision="fp16", steps=4, eval_every=None, overflow_at_step=2)
    for result in trained(layout, recipe):
        assert result.finite == [True, False, True, True]
        assert result.loss_scales == [65536.0, 32768.0, 32768.0, 32768.0]
        assert math.isfinite(result.losses[1]), "the forward was fine; only a gradient overflowed"
        assert all(tensor.isfinite().all() for tensor in result.state.values())


@pytest.mark.parametrize(
    "layout",
    [
        slow(Layout("pipe_ddp", dp=2, pp=2, chunks=4)),
        slow(Layout("ddp", dp=4, chunks=1)),
        slow(Layout("fsdp", dp=2, chunks=2)),
    ],
    ids=str,
)
def test_a_loss_scale_too_large_for_float16_comes_down_as_in_one_process(trained, layout):
    recipe = dataclasses.replace(GPT2, precision="fp16", global_batch=8, steps=6, eval_every=None, loss_scale=2.0**21)
    (reference,) = trained(layout.same_cut, recipe)
    halvings = reference.finite.count(False)
    assert 0 < halvings < 6
    for result in trained(layout, recipe):
        assert result.finite == reference.finite == [False] * halvings + [True] * (6 - halvings)
        assert result.loss_scales[-1] == 2.0 ** (21 - halvings)
        assert result.losses == pytest.approx(reference.losses, rel=1e-4)


def assert_close(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert weights.keys() == wanted.keys()
    far = {name: ((weights[name] - w).norm() / w.norm()).item() for name, w in wanted.items()}
    assert max(far.values()) <= tolerance, {name: d for name, d in far.items() if d > tolerance}


def assert_same_bits(run: list, wanted: list) -> None:
    assert (run[0].losses, run[0].norms) == (wanted[0].losses, wanted[0].norms)
    some, others = weights_of(run), weights_of(wanted)
    assert [name for name in others if not torch.equal(some[name], others[name])] == []
