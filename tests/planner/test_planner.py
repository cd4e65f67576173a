"""The planner on paper: what is counted, predicted and chosen, and what is refused."""

import math
import re
import shlex
from contextlib import redirect_stdout
from cProfile import Profile
from dataclasses import fields, replace
from functools import cache, partial
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from composed import compose, execute, plain
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from common.errors import PlanError, UserError
from conf import FOLDER, composition, options
from conf.instantiate import to_dict
from conf.keys import read_options
from data.dataset import Batch
from models.cut import Experts
from models.moe import moe
from models.sequential import chain_of
from parallel.axes.axis import Axis, Collective
from parallel.strategies import STRATEGIES
from planner import search as planning
from planner.balance import equal_stages
from planner.cluster import Cluster, Link, read_cluster
from planner.costs import PaperCosts
from planner.layout import PlannedLayout, cut
from planner.memory import Allocation, Rank, fullest
from planner.search import Devices, Pool, allowed, layouts
from planner.step import Seconds, seconds_of
from planner.work import LayerWork, Tie, work_of
from training.reporting.run_directory import release
from training.run.prepare import model_and_data
from training.run.setup import Setup

PLAIN = Cluster(
    nodes=2, devices=4, device="made up", peak={"bf16": 1e12}, memory=8e9, memory_bandwidth=1e11,
    inside=Link(1e10, 0.0), between=Link(1e9, 0.0), product=0.5, attention=0.5, traffic=1.0, launch=0.0, message=1.0,
    step=0.0, reserved=0.0, source="this test",
)  # fmt: skip
ENDS = LayerWork("embedding", 0, 0, 0, 0, 0, 1e4, 0), LayerWork("head", 0, 0, 0, 0, 0, 4, 0)
BLOCK = LayerWork("block", 1e9, 1e8, 2, 0, 1_000_000, 1e4, 1e6, cast=2_000_000, hidden=5e3, queries=5e3, keys=2e3)
WORKS = [ENDS[0], *[BLOCK] * 8, ENDS[1]]
pipelined = partial(PlannedLayout, "pipelined", schedule="1f1b")
COSTS = PaperCosts(PLAIN, "bf16")
PAPER = Allocation(gathered=2, process=0.0)
TENSOR = [{"tp": n, "sequence": n > 1} for n in (1, 2, 4, 8)]
DEVICES = Devices(COSTS, count=8, memory=PLAIN.memory, allocation=PAPER)


def search(works, batch, kinds, whole=False, **how):
    """The result of all layouts."""
    each = (layouts(works, batch, Pool(one.costs.devices, one.count, whole), **how) for one in kinds)
    return planning.search(works, zip(kinds, each, strict=True))


@cache
def composed(word):
    return to_dict(compose("parallel=auto", "mode=plan", word).cluster)


def section(name, **changes):
    """What Hydra composes of a cluster's file and its device's."""
    return {**composed(f"cluster={name}"), **changes}


# -- what is counted ---------------------------------------------------------------------------------------------------


class First(nn.Module):
    """What ``call`` computes with a module and x [b, 16, 32], or the first of it, as two numbers for each sample."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x):
        y = self.call(self.module, x)
        return (y[0] if isinstance(y, tuple) else y).flatten(1).mean(1, keepdim=True).expand(-1, 2)


def call(module, x):
    return module(x)


def grouped(module, x):
    ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) * 4)
    rows = F.grouped_mm(x.flatten(0, 1).bfloat16(), module.weight.view(4, 32, 16).bfloat16(), offs=ends)
    return rows.float().view(len(x), 16, 16)


# FLOPs of arithmetic for a sample [16, 32]; None where torch's operator has no formula, and is named.
COUNTED = {
    "nn.LSTM": (nn.LSTM(32, 64, batch_first=True), call, 2 * 16 * 4 * 64 * (32 + 64)),
    "two ways, two layers": (
        nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True), call, 2 * 16 * 2 * 4 * 64 * (32 + 64 + 128 + 64),
    ),
    "projected": (nn.LSTM(32, 64, batch_first=True, proj_size=8), call, 2 * 16 * (4 * 64 * (32 + 8) + 64 * 8)),
    "nn.GRU": (nn.GRU(32, 64, batch_first=True), call, 2 * 16 * 3 * 64 * (32 + 64)),
    "nn.RNN": (nn.RNN(32, 64, batch_first=True), call, 2 * 16 * 64 * (32 + 64)),
    "nn.Bilinear": (nn.Bilinear(32, 32, 8), lambda module, x: module(x, x), 2 * 16 * 8 * 32 * 32),
    "attention": (nn.Identity(), lambda _, x: F.scaled_dot_product_attention(*[x[:, None]] * 3), 4 * 16 * 16 * 32),
    "groups": (nn.Linear(32, 64, bias=False), grouped, 2 * 16 * 32 * 16),
    "a vector": (nn.Linear(32, 1), lambda module, x: x @ module.weight[0], 2 * 16 * 32),
    "a transposed convolution": (nn.ConvTranspose1d(16, 8, 4, 2), call, 2 * 16 * 32 * 8 * 4),
    "einsum": (nn.Linear(32, 64), lambda m, x: torch.einsum("bti,hi->bth", x, m.weight), 2 * 16 * 32 * 64),
    "aten.linalg_matrix_exp": (nn.Identity(), lambda _, x: torch.linalg.matrix_exp(x[:, :, :16]), None),
    "aten._pdist_forward": (nn.Identity(), lambda _, x: F.pdist(x[0]).sum() * x, None),
    "aten._fft_r2c": (nn.Identity(), lambda _, x: torch.fft.rfft(x).abs(), None),
    "layer '0'": (nn.Identity(), lambda _, x: flex_attention(*[x.detach()[:, None]] * 3), None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of torch, about flex_attention
@pytest.mark.parametrize("name", COUNTED)
def test_the_flops_of_operators_are_those_of_arithmetic_or_the_operator_is_named(name):
    module, computed, flops = COUNTED[name]
    chain = chain_of(nn.Sequential(First(module, computed), nn.Linear(2, 2)), nn.CrossEntropyLoss())
    (work, last), _ = work_of(chain, Batch(torch.randn(4, 16, 32), torch.zeros(4, dtype=torch.long)), "fp32")
    assert work.flops + work.attention == pytest.approx(flops or 0, rel=0.05)
    assert work.uncounted == (frozenset() if flops is not None else {name}) and last.flops == 2 * 2 * 2


WIDE = "model.n_embd=32", "model.n_head=4", "model.vocab_size=300"
ATTENDING = {  # elements of queries, and of keys and values, of a sample of 16 tokens
    "gpt2": (["model=gpt2", "model.size=tiny", *WIDE], 16 * 32, 2 * 16 * 32),
    "with dropout": (["model=gpt2", "model.size=tiny", "model.dropout=0.1", *WIDE], 16 * 32, 2 * 16 * 32),
    "grouped": (["model=llama", "model.kv_heads=2", "model.head_dim=6", *WIDE], 16 * 24, 2 * 16 * 12),
}


def works_of(length, *words):
    """The work of the layers of a model for a sample of ``length`` tokens."""
    _, chain, _ = model_and_data(plain(compose(*words)))
    tokens = torch.zeros(2, length, dtype=torch.long)
    return work_of(chain, Batch(tokens, tokens), "fp32")[0]


@pytest.mark.parametrize("name", ATTENDING)
def test_a_part_of_the_tokens_has_their_part_of_the_work_and_all_keys(name):
    words, queries, keys = ATTENDING[name]
    whole, half = works_of(16, *words), works_of(8, *words)
    assert [(work.queries, work.keys) for work in whole[1:-1]] == [(queries, keys)] * (len(whole) - 2)
    assert not any(work.queries or work.keys for work in (whole[0], whole[-1]))
    for work, short in zip((work.of_tokens(2) for work in whole), half, strict=True):
        # a quarter of the pairs of tokens is in a sequence of half the length, and a half in a rank's part
        assert (work.attention, work.masked) == (2 * short.attention, 2 * short.masked)
        if "model.dropout=0.1" not in words:  # no kernel, so pairs are in most numbers
            for key in ("flops", "kept", "queries", "keys", *(["output", "hidden"] if work.name != "head" else [])):
                assert getattr(work, key) == pytest.approx(getattr(short, key), rel=0.01), (work.name, key)
            # the weights of norms and biases are read for a sequence of any length
            assert (work.moved, work.whole) == pytest.approx((short.moved, short.whole), rel=0.03)
        assert (work.parameters, work.cast, work.ties) == (short.parameters, short.cast, short.ties)


def mixture(experts=4, **more):
    """The work of a mixture of 2 layers of width 32, for 16 tokens that take 2 experts each."""
    chain = moe(n_layer=2, n_embd=32, head_dim=8, experts=experts, expert_width=8, vocab_size=100, **more)
    chain = replace(chain, cut={**chain.cut, "layers.*.mlp.experts": Experts()})
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return work_of(chain, Batch(tokens, tokens), "fp32")[0]


def test_experts_and_what_is_sent_to_them_are_counted_and_ranks_have_their_part():
    embedding, layer, _, head = mixture()
    each = 32 * 3 * 8  # of an expert
    assert (layer.experts, layer.routed, layer.frozen_experts) == (4 * each, 16 * 2 * 32, 0)
    assert not any(getattr(work, key) for work in (embedding, head) for key in ("experts", "routed"))
    half = layer.of_experts(2)
    assert (half.experts, half.parameters) == (2 * each, layer.parameters - 2 * each)
    assert (half.flops, half.kept, half.routed) == (layer.flops, layer.kept, layer.routed)
    cut = layer.divided(2, False)
    assert (cut.experts, cut.parameters - 4 * each) == (4 * each, (layer.parameters - 4 * each) / 2)


def test_ranks_that_share_experts_hold_send_and_average_what_arithmetic_says():
    works, each = mixture(experts=8), 8 * 32 * 3 * 8
    whole = sum(work.parameters for work in works) - sum(tie.parameters for work in works for tie in work.ties)
    experts, number, seconds, memory = 2 * each, 4, {}, {}
    for name, ep in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)):
        layout = PlannedLayout(name, dp=4, ep=ep, samples=3, overlaps=False)
        memory[name, ep] = fullest(works, layout, Allocation(process=0.0))
        seconds[name, ep] = seconds_of(works, layout, COSTS)
    assert memory["ddp", 2].weights == number * (whole - experts / 2)
    assert memory["ddp", 2].optimizer == 2 * number * (whole - experts / 2)
    assert memory["fsdp", 2].weights == memory["fsdp", 1].weights == number * whole / 4
    assert memory["fsdp", 2].optimizer == memory["fsdp", 1].optimizer
    # two layers send their rows forward and back, twice; of two ranks, each sends half of its rows to the other
    assert seconds["ddp", 2].experts == pytest.approx(2 * 4 * (3 * 16 * 2 * 32 * 2) / 2 / 1e10)
    # an all-reduce among all four, and of the experts of a rank among the two that have them
    sums = 3 / 4 * (whole - experts) + 1 / 2 * experts / 2
    assert (seconds["ddp", 1].experts, seconds["ddp", 2].gradients) == (0, pytest.approx(2 * 4 * sums / 1e10))


# -- what is predicted -------------------------------------------------------------------------------------------------


def test_stages_wait_for_each_other_s_shards():
    slow = PaperCosts(replace(PLAIN, inside=Link(1e7, 0.0)), "bf16")
    one, two = (seconds_of(WORKS, layout, slow) for layout in (
        PlannedLayout("fsdp", dp=2, chunks=4),
        PlannedLayout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="1f1b", reshard=True, ends_on_top=True),
    ))  # fmt: skip
    assert two.shards == pytest.approx(one.shards / 2 * (1 + 1 / 4), rel=0.02), "half of the layers, and a bubble"


def test_zero1_shares_states_and_weights_in_float32_and_gathers_less():
    plain, zero1 = (PlannedLayout("ddp", dp=4, overlaps=False, zero1=on) for on in (False, True))
    whole, shared = (fullest(WORKS, layout, PAPER) for layout in (plain, zero1))
    assert (shared.weights, shared.optimizer) == (whole.weights / 4, whole.optimizer / 4)
    assert (shared.gradients, shared.cast) == (whole.gradients, whole.cast)
    before, after = (seconds_of(WORKS, layout, COSTS) for layout in (plain, zero1))
    assert after.gradients == pytest.approx(before.gradients * 6 / 8), "half the bytes in the second half of it"
    assert after.optimizer == pytest.approx(before.optimizer / 4)


@pytest.mark.parametrize("rule", ["time", "size"])
def test_stages_that_a_run_will_balance_are_predicted_balanced(rule):
    heavy = replace(ENDS[1], flops=4e9, parameters=4_000_000)  # as much as four blocks
    works = [ENDS[0], *[BLOCK] * 8, heavy]
    fixed = {"strategy": "pipelined", "pp": 2, "recompute": "none", "schedule": "1f1b"}
    uniform, balanced = (
        search(works, 8, [DEVICES], fixed={**fixed, **more}).best[0] for more in ({}, {"balance": rule})
    )
    assert balanced.layout.counts in ((6, 4), (7, 3)) and balanced.seconds.total < 0.9 * uniform.seconds.total
    assert "parallel.balance" not in " ".join(balanced.layout.words()), "the run measures its own"


def test_predicted_stages_are_those_that_a_run_makes_of_the_bytes_of_its_own_layout():
    """Layouts differ in the bytes of a layer: by what replicas share, and by the micro-batches in flight."""
    works, found = [ENDS[0], *[BLOCK] * 8, replace(ENDS[1], parameters=4_000_000)], set()
    for one in search(works, 64, [DEVICES], fixed={"balance": "size", "pp": 4}).best:
        if one.layout.per_rank == 1:
            costs = Rank(works, one.layout, PAPER, 2).each_layer()
            assert [*one.layout.counts] == equal_stages(costs, 4, chunks=one.layout.chunks), one.name
            found.add(one.layout.counts)
    assert len(found) > 1


def test_stages_stay_even_if_no_others_would_be_faster():
    """One layer takes longer than any stage of the others, so all cuts between them are as good."""
    works = [ENDS[0], *[BLOCK] * 8, replace(ENDS[1], flops=4e10)]
    fixed = {"balance": "time", "pp": 8, "schedule": "1f1b", "recompute": "full"}
    assert {one.layout.counts for one in search(works, 8, [DEVICES], fixed=fixed).best} == {(2, 2, 1, 1, 1, 1, 1, 1)}


def test_recomputing_costs_a_forward_and_saves_memory():
    plain, again = (PlannedLayout("single", samples=4, recompute=how) for how in ("none", "full"))
    assert seconds_of(WORKS, again, COSTS).compute == pytest.approx(4 / 3 * seconds_of(WORKS, plain, COSTS).compute)
    kept, least = (one.activations + one.recomputed for one in (fullest(WORKS, one, PAPER) for one in (plain, again)))
    assert kept == 8 * 4 * 1e6 and least == pytest.approx(4 * 1e6 + 9 * 4 * 1e4)


def test_shares_divide_the_state_and_stages_the_layers():
    whole = fullest(WORKS, PlannedLayout(), Allocation(process=5.0))
    assert (whole.state, whole.process) == (16 * 8_000_000, 5.0)
    assert fullest(WORKS, PlannedLayout("fsdp", dp=4), PAPER).state == whole.state / 4
    assert fullest(WORKS, pipelined(pp=4, chunks=4, ends_on_top=True), PAPER).state == whole.state / 4
    assert [len(stage) for stage in cut(WORKS, PlannedLayout(pp=4))] == [3, 3, 2, 2]
    assert [len(stage) for stage in cut(WORKS, PlannedLayout(pp=4, ends_on_top=True))] == [3, 2, 2, 3]


def test_a_pipeline_s_shares_have_whole_parameters_and_gradients_for_a_step():
    one = fullest(WORKS, PlannedLayout("pipe_fsdp", dp=2, pp=2, chunks=2, reshard=False, schedule="1f1b"), PAPER)
    assert one.gathered == (2 + 4) * 4_000_000, "half of eight blocks, in bf16; gradients in float32"


def test_frozen_parameters_have_no_gradients_no_states_and_no_update():
    frozen = [replace(work, frozen=work.parameters) for work in WORKS[:-2]]
    half = [*frozen, *WORKS[-2:]]
    assert fullest(half, PlannedLayout(), PAPER).state == 4 * 8_000_000 + 12 * 1_000_000
    some, whole = (seconds_of(layers, PlannedLayout("ddp", dp=8, overlaps=False), COSTS) for layers in (half, WORKS))
    assert some.gradients == pytest.approx(whole.gradients / 8)
    assert some.optimizer == pytest.approx(whole.optimizer / 8)


def test_a_balance_has_all_layers():
    assert allowed(WORKS, pipelined(pp=2, chunks=2, balance=(4, 6)))
    assert not allowed(WORKS, pipelined(pp=2, chunks=2, balance=(4, 4)))


def test_a_tied_weight_is_held_once_by_a_rank_and_its_gradients_pass_between_two():
    head = replace(BLOCK, name="head", parameters=3_000_000, ties=(Tie("embedding", 3_000_000),))
    tied = [ENDS[0], *[BLOCK] * 2, head]
    assert fullest(tied, PlannedLayout(), PAPER).state == 16 * 2_000_000
    assert seconds_of(tied, PlannedLayout(), COSTS).gradients == 0.0
    overhead = seconds_of(tied, pipelined(pp=2, chunks=2), COSTS)
    assert overhead.gradients == pytest.approx(COSTS.reduce(4 * 3e6, 2, 2))


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_the_best_is_the_fastest_of_all_that_fit_and_each_uses_what_there_is():
    found = search(WORKS, 16, [DEVICES], divided=TENSOR)
    everything = list(layouts(WORKS, 16, Pool(4, 8), TENSOR[:3]))
    assert found.tried == len(everything) and {one.processes for one in everything} <= {1, 2, 4, 8}
    fastest = min(seconds_of(WORKS, one, COSTS).total for one in everything)
    assert found.best[0].seconds.total == fastest
    assert all(one.dp * one.chunks * one.samples == 16 for one in everything), "the batch is not the planner's"
    assert {"single", "tensor", "ddp", "fsdp", "hsdp", "pipelined", "pipe_ddp", "pipe_fsdp"} == {
        one.strategy for one in everything
    }


def test_what_is_typed_is_kept():
    found = search(WORKS, 16, [DEVICES], fixed={"pp": 4, "schedule": "1f1b"})
    assert {(one.layout.pp, one.layout.schedule) for one in found.best} == {(4, "1f1b")}
    found = search(WORKS, 16, [DEVICES], fixed={"strategy": "pipelined", "schedule": "planned", "stages_per_rank": 1})
    assert {(one.layout.schedule, one.layout.per_rank) for one in found.best} == {("planned", 1)}
    found = search(WORKS, 16, [DEVICES], fixed={"strategy": "model_parallel", "dp": 1, "pp": 1})
    assert found.best[0].layout.words()[0] == "parallel=model_parallel"


def test_no_micro_batch_is_smaller_than_the_layers_take():
    assert min(one.layout.samples for one in search(WORKS, 16, [DEVICES], least=2).best) == 2


@pytest.mark.parametrize("size, least", [(64, 1), (32, 2)])
def test_batchnorm_takes_one_sample_where_its_maps_have_several_numbers(size, least):
    cfg = plain(compose("model=resnet50", f"data.image_size={size}"))
    _, chain, data = model_and_data(cfg)
    data.prepare()
    setup = Setup(cfg, chain, data, SimpleNamespace(precision="fp32"))
    assert (setup.work[1], setup.has_batchnorm) == (least, True)


def test_of_several_places_each_has_the_layouts_that_need_all_of_its_devices():
    found = search(WORKS, 16, [replace(DEVICES, count=n) for n in (1, 2, 4)], whole=True)
    assert {one.layout.processes for one in found.best} == {1, 2, 4}
    assert all(one.layout.processes == one.devices.count for one in found.best)


def test_where_nothing_fits_the_nearest_is_named_with_what_it_misses():
    with pytest.raises(PlanError, match=r"none of \d+ layouts fits into 0.0 GiB; .*parallel=.* needs .* GiB, .* more"):
        search(WORKS, 16, [replace(DEVICES, memory=1e6)])
    found = search(WORKS, 16, [replace(DEVICES, memory=1.3e8)])
    assert "single" in found.nearest and found.nearest["single"].memory.total > 1.3e8


def test_numbers_may_leave_devices_free_but_all_nodes_have_equally_many_processes():
    found = search(WORKS, 16, [DEVICES], fixed={"pp": 3, "dp": 2})
    assert {one.layout.processes for one in found.best} == {6}
    assert {one.layout.dp for one in search(WORKS, 15, [DEVICES]).best if one.layout.strategy == "ddp"} == {3}
    assert {one.layout.strategy for one in search(WORKS, 16, [DEVICES], fixed={"schedule": "1f1b"}).best} == {
        "pipelined", "pipe_ddp", "pipe_fsdp",
    }  # fmt: skip


def test_frozen_parameters_that_are_tied_are_not_taken_off_twice():
    first = replace(ENDS[0], parameters=500, frozen=500)
    last = replace(ENDS[1], parameters=500, frozen=500, ties=(Tie("embedding", 500, 500),))
    tied = [first, replace(BLOCK, frozen=BLOCK.parameters - 100), last]
    for one in layouts(tied, 16, Pool(4, 8)):
        assert all(getattr(seconds_of(tied, one, COSTS), part.name) > -1e-12 for part in fields(Seconds))


@pytest.mark.slow
def test_a_thousand_devices_take_seconds():
    """Counted in calls, of which a core makes millions a second, as seconds depend on what else the machine does."""
    large = replace(PLAIN, nodes=128, devices=8, memory=1e12)
    devices = Devices(PaperCosts(large, "bf16"), 1024, 1e12, PAPER)
    with Profile() as profile:
        found = search([ENDS[0], *[BLOCK] * 80, ENDS[1]], 2048, [devices], divided=TENSOR)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert found.tried > 2000 and calls < 30_000_000


def test_ranks_that_share_layers_and_do_not_divide_a_node_wait_for_the_network():
    alone, beside = (seconds_of(WORKS, PlannedLayout("ddp", dp=dp, tp=3), COSTS).tensor for dp in (1, 2))
    assert beside == pytest.approx(10 * alone), "of two groups of three, one is on both nodes of four"


class Sending(Axis):
    """An axis of which each rank has half of a layer and sends something to the others."""

    @classmethod
    def work_of_rank(cls, layout, work):
        return replace(work, hidden=work.hidden / 2)

    @classmethod
    def collectives(cls, layout, work):
        return [Collective(kind, 3, work.hidden, 5) for kind in sent] if work.hidden else []


# Seconds of 8 ranks in two nodes of four, and of 2 in one, of 1e4 bytes (samples x hidden in bf16). A ring of 8 crosses
# to the other node with all four links (4e9 bytes a second), and a rank of an all-to-all with its own (1e9).
INSIDE, BETWEEN = Link(1e10, 1e-3), Link(1e9, 1e-2)
EACH = {
    "all_reduce": (2 * (7 / 8 * 1e4 / 4e9 + 6e-3 + 1e-2), 2 * (1 / 2 * 1e4 / 1e10 + 1e-3)),
    "all_gather": (7 / 8 * 1e4 / 4e9 + 6e-3 + 1e-2, 1 / 2 * 1e4 / 1e10 + 1e-3),
    "reduce_scatter": (7 / 8 * 1e4 / 4e9 + 6e-3 + 1e-2, 1 / 2 * 1e4 / 1e10 + 1e-3),
    "all_to_all": (3 * (1e4 / 8 / 1e10 + 1e-3) + 4 * (1e4 / 8 / 1e9 + 1e-2), 1e4 / 2 / 1e10 + 1e-3),
    "ring": (1e4 / 4e9 + (6e-3 + 1e-2) / 7, 1e4 / 1e10 + 1e-3),
}
sent: list[str] = []


@pytest.mark.parametrize("kind", EACH)
def test_a_collective_takes_the_seconds_of_its_bytes_forward_backward_and_if_recomputed(kind, monkeypatch):
    costs = PaperCosts(replace(PLAIN, inside=INSIDE, between=BETWEEN), "bf16")
    monkeypatch.setattr(__name__ + ".sent", [kind])
    for ranks, each in zip((8, 2), EACH[kind], strict=True):
        layout = PlannedLayout("ddp", axes=(("mine", f"{__name__}:Sending", ranks),))
        for recompute, times in (("none", 3 + 5), ("full", 3 + 3 + 5)):
            parts = seconds_of(WORKS, replace(layout, recompute=recompute), costs)
            assert parts.tensor == pytest.approx(8 * times * each), (ranks, recompute)
    monkeypatch.setattr(__name__ + ".sent", [kind, kind])
    assert seconds_of(WORKS, layout, costs).tensor == pytest.approx(2 * 8 * 8 * each)


class Summing(Sending):
    """An axis of which each rank has other terms of the loss, and all parameters."""

    divides_batch = True


def test_ranks_with_other_terms_of_the_loss_sum_all_gradients_after_the_backward(monkeypatch):
    monkeypatch.setattr(__name__ + ".sent", [])
    for layout, shards in ((PlannedLayout(), 1), (PlannedLayout("fsdp", dp=2), 2)):
        with_axis = replace(layout, axes=(("mine", f"{__name__}:Summing", 2),))
        one, summed = (seconds_of(WORKS, each, COSTS).gradients for each in (layout, with_axis))
        assert summed - one == pytest.approx(4 * 8e6 / shards / 1e10)


def test_each_axis_sends_parts_of_what_the_others_divide(monkeypatch):
    monkeypatch.setattr(__name__ + ".sent", ["all_reduce"])
    one, mine = PlannedLayout("ddp", tp=2), (("mine", f"{__name__}:Sending", 2),)
    alone, both = (seconds_of(WORKS, layout, COSTS).tensor for layout in (one, replace(one, axes=mine)))
    assert alone == pytest.approx(8 * 4 * 2 * 5e3 / 1e10)
    # tensor parallelism halves the hidden states of the other axis, and the other those of tensor parallelism
    assert both == pytest.approx(alone / 2 + 8 * 8 * 5e3 / 2 * 2 / 1e10)


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*options("cluster")} - {"here"}))
def test_every_cluster_is_whole_and_says_where_its_numbers_come_from(name):
    cluster = read_cluster(section(name))
    assert cluster.size >= 2 and len(cluster.source) > 20 and section(name)["name"] == name


# FLOP/s in bf16, bytes a second of the memory, and of NVLink in one direction: what the data sheets state.
SHEETS = {
    "a100": (312e12, 2.039e12, 300e9), "h100": (989e12, 3.35e12, 450e9), "h200": (989e12, 4.8e12, 450e9),
    "b200": (2250e12, 7.7e12, 900e9),
}  # fmt: skip


@pytest.mark.parametrize("device", sorted(path.stem for path in (FOLDER / "cluster" / "device").glob("*.yaml")))
def test_no_number_of_a_device_is_more_than_its_hardware_can(device):
    own = composed(f"+cluster/device@cluster={device}")
    cluster = read_cluster({"name": "of a device", "nodes": 1, "devices": 8, **own})
    described = cluster.peak["bf16"], cluster.memory_bandwidth, cluster.inside.bandwidth
    assert all(ours <= theirs for ours, theirs in zip(described, SHEETS[device], strict=True))
    assert max(cluster.product, cluster.attention, cluster.traffic, cluster.message) <= 1


def test_clusters_of_one_device_differ_in_size_and_network_alone():
    two = section("a100x64"), section("a100x512")
    assert {key for key in two[0] if two[0][key] != two[1][key]} == {"name", "nodes", "between", "source"}
    assert compose("mode=plan", "parallel=auto", "cluster=a100x64").cluster == two[0], "as the command line has it"


def test_a_cluster_file_of_one_s_own_needs_its_device_and_its_size_and_has_its_name(tmp_path):
    (tmp_path / "cluster").mkdir()
    text = "defaults: [device@_here_: h100, _self_]\nnodes: 2\ndevices: 8\n"
    for file, more in (("ours", ""), ("yours", "name: other\n")):
        (tmp_path / "cluster" / f"{file}.yaml").write_text(text + more)
        cfg = composition.compose(["--config-dir", str(tmp_path), "mode=plan", "parallel=auto", f"cluster={file}"])
        cluster = read_cluster(to_dict(cfg.cluster))
        assert (cluster.size, cluster.device, cluster.guess, cfg.cluster.name) == (16, "H100 80 GB", True, file)
    described = {option.word: option.keys for option in read_options("cluster", [tmp_path])}
    named = {key.name for key in described["cluster=ours"]}
    assert {"cluster.product", "cluster.nodes"} <= named, "the help has the device's, too"
    (tmp_path / "cluster" / "ours.yaml").write_text(text.replace("h100", "h1000"))
    assert "cluster=ours" in [option.word for option in read_options("cluster", [tmp_path])], "and lists a wrong one"


WRONG = {
    "negative": ({"memory": -1}, r"memory=-1 must be a number from 1e\+06 to 1e\+15"),
    "a number as text": ({"memory": "8e9"}, "memory='8e9' must be a number"),
    "true": ({"devices": True}, "devices=True must be a whole number from 1 to 1,000"),
    "nan": ({"step": math.nan}, "step=nan must be a number from 0 to 3,600"),
    "more than a float": ({"memory": 10**400}, r"memory=1000\d+\.\.\.0+ must be a number"),
    "tiny": ({"between": {"bandwidth": 1e-300, "latency": 0}}, "between.bandwidth=1e-300 must be a number from 1,000"),
    "half a node": ({"nodes": 1.5}, "nodes=1.5 must be a whole number"),
    "nodes and devices": ({"nodes": 100_000, "devices": 100}, "nodes x devices=10,000,000 must be at most 1,000,000"),
    "a link": ({"inside": {"bandwidth": 1e9}}, "inside must have bandwidth and latency"),
    "a peak": ({"peak": {"bf16": 0}}, "peak.bf16=0 must be a number"),
    "a peak that is none": ({"peak": {"bf17": 1e15}}, "peak has bf17; the precisions are fp64, fp32, bf16"),
    "misspelt": ({"inside": {"bandwith": 1e9, "latency": 0}}, "have bandwidth and latency, and has bandwith"),
    "unknown": ({"colour": 1}, "does not know colour; its keys are name, nodes"),
}


@pytest.mark.parametrize("changes, says", WRONG.values(), ids=WRONG)
def test_a_wrong_number_of_a_cluster_is_named(changes, says):
    with pytest.raises(PlanError, match=rf"cluster=a100x64 \(cluster/a100x64.yaml\).*{says}"):
        read_cluster(section("a100x64", **changes))


def test_what_a_cluster_lacks_is_named():
    lacking = section("a100x64")
    del lacking["between"]
    with pytest.raises(PlanError, match=r"\(cluster/a100x64.yaml\) lacks between"):
        read_cluster(lacking)
    del lacking["name"]
    with pytest.raises(PlanError, match="the cluster's file lacks between, name"):
        read_cluster(lacking)


# -- the command -------------------------------------------------------------------------------------------------------

TINY = ("model=gpt2", "model.size=tiny", "data.seq_len=32", "train.global_batch_size=64", "logger=none")


def plan(tmp_path, capsys, *words):
    try:
        execute(compose("mode=plan", "parallel=auto", *TINY, *words), tmp_path, None)
    finally:
        release(tmp_path)
    return capsys and capsys.readouterr().out


def test_the_plan_has_the_best_ten_each_strategy_s_best_and_a_command_that_is_accepted(tmp_path, capsys):
    said = plan(tmp_path, capsys, "cluster=a100x64")
    rows = [row for row in map(str.split, said.splitlines()) if len(row) > 1 and row[1] in STRATEGIES]
    assert [row[0] for row in rows][:10] == [str(i) for i in range(1, 11)]
    assert {row[1] for row in rows if row[0] == "best"} >= {"ddp", "fsdp", "pipe_ddp", "pipe_fsdp", "hsdp"}
    command = next(line for line in said.splitlines() if "parallel=pipe_ddp" in line).partition("train.py ")[2]
    chosen = compose(*TINY, *[word for word in shlex.split(command) if word.startswith(("parallel", "train."))])
    assert chosen.parallel.dp * chosen.parallel.tp * chosen.parallel.pp == 64
    assert (tmp_path / "predicted_timeline.png").stat().st_size > 10_000
    assert "off on average in six tables" in said


@pytest.fixture(scope="module")
def of_three_nodes(tmp_path_factory):
    """What mode=plan prints for three nodes of three devices."""
    with redirect_stdout(StringIO()) as said:
        plan(tmp_path_factory.mktemp("plan"), None, "cluster=a100x64", "cluster.nodes=3", "cluster.devices=3")
    return said.getvalue()


def test_each_command_of_a_plan_asks_for_the_nodes_that_its_layout_fills_equally(tmp_path, capsys, of_three_nodes):
    asked = {}
    for line in of_three_nodes.splitlines():
        if not line.startswith("  python train.py "):
            continue
        numbers = dict(re.findall(r"parallel\.(dp|tp|pp)=(\d+)", line))
        processes = math.prod(map(int, numbers.values()))
        nodes = int(re.search(r"launcher=slurm launcher.nodes=(\d)", line)[1])
        assert nodes == math.ceil(processes / 3) and processes % nodes == 0, line
        assert line.endswith(f" launcher.gpus_per_node={processes // nodes}"), "a job gets no GPUs unless it asks"
        asked[processes] = nodes
    assert asked[1] == 1 and len(asked) > 2
    without = plan(tmp_path, capsys, "cluster=a100x64", "cluster.nodes=2", "device=cpu")
    assert "launcher=slurm" in without and "gpus_per_node" not in without


def test_a_plan_says_how_many_devices_each_layout_leaves_idle_unless_none_does(tmp_path, capsys, of_three_nodes):
    head, *rows = re.search(r"^ *layout .*\n(?:.+\n)+", of_three_nodes, re.MULTILINE)[0].splitlines()
    at = head.index("idle")
    found = {row[:at].strip(): int(row[at:].split()[0]) for row in rows}
    for name, idle in found.items():
        assert idle == 9 - math.prod(int(size) for size in re.findall(r"(?:dp|tp|pp)=(\d+)", name)), name
    assert len({*found.values()}) > 2
    alone = plan(tmp_path, capsys, "cluster=a100x64", "cluster.nodes=1", "cluster.devices=1")
    assert "layout" in alone and " idle " not in alone and "launcher=slurm" not in alone


def test_a_plan_refuses_an_optimizer_that_the_model_does_not_allow(tmp_path, capsys):
    with pytest.raises(UserError, match="Muon is for the matrices of hidden layers"):
        execute(compose("mode=plan", "parallel=auto", "cluster=laptop", "model=resnet50", "optim=muon"), tmp_path, None)


def test_a_plan_says_that_its_cluster_is_a_guess_and_which_layouts_are_close_to_the_memory(tmp_path, capsys):
    sizes = "nodes=1", "devices=1", "guess=true", "reserved=1.15e9", "memory=1.3e9"
    said = plan(tmp_path, capsys, "cluster=a100x64", *(f"cluster.{size}" for size in sizes))
    assert "some numbers of this cluster are guesses: such predictions were 2 to 8 % off" in said
    assert re.search(r"\d of the best 10 layouts \([\d, ]+\) need more than 90 % of a device's memory", said)


REFUSED = {
    "a precision without a peak": (("cluster=laptop", "train.precision=fp16"), "no peak for train.precision=fp16"),
    "training": (("cluster=laptop", "mode=train"), "mode=plan or launcher=slurm: type .*or leave cluster= out"),
    "a job without a cluster": (("mode=train", "launcher=slurm"), "with cluster=NAME of conf/cluster"),
    "an evaluation": (("mode=eval", "checkpoint=/nowhere"), "no checkpoint at /nowhere"),
}


@pytest.mark.parametrize("words, says", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planned_is_said(tmp_path, capsys, words, says):
    with pytest.raises(UserError, match=says):
        plan(tmp_path, capsys, *words)


def test_batchnorm_s_micro_batch_is_not_changed_without_a_word(tmp_path, capsys):
    words = ("model=resnet50", "data.image_size=32", "data.samples=200")
    execute(compose("mode=plan", "parallel=auto", "cluster=laptop", "logger=none", *words), tmp_path, None)
    said = capsys.readouterr().out
    best = re.search(r"^1 +(.*?)  ", said, re.MULTILINE)[1]
    assert re.search(rf"BatchNorm .*: {best} has \d+ samples in each, as parallel=single parallel.chunks=\d+", said)
