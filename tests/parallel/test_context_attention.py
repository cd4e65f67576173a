"""Attention of a sequence that ranks share, beside plain products of the whole sequence on one process."""

import itertools
import math
import re
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from slow_cases import with_slow
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from common.errors import PlanError
from models.seeds import Dropout, Part, Samples, computing
from parallel.axes.context_attention import WAYS, ContextAttention, _Dense
from parallel.mesh import Ranks

BORDERS = [[0] * 4 + [1] * 4 + [2] * 8, [5] * 3 + [6] * 4 + [7] * 2 + [5] * 7]  # on chunks' borders, and inside
CASES = {
    "causal": {},
    "grouped heads": {"heads": 8},
    "a window of itself": {"window": 1},
    "a window": {"window": 3},
    "a window wider than a chunk": {"window": 7},
    "a window longer than the sequence": {"window": 100},
    "a soft cap": {"softcap": 0.7},
    "documents": {"documents": BORDERS},
    "an odd width": {"width": 5},
    "narrow values": {"of_values": 3},
    "one sample": {"b": 1},
    "chunks of one token": {"t": 8},
    "a scale": {"scale": 0.9},
    "all at once": {"heads": 8, "window": 6, "softcap": 1.5, "documents": BORDERS, "scale": 0.5},
}


def plain(q, k, v, *, scale=None, window=None, softcap=None, documents=None, keep=None):
    """Causal attention [b, heads, t, width] by its definition. ``keep`` multiplies the probabilities."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (distance >= 0) & (distance < (window or math.inf))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (probabilities if keep is None else probabilities * keep) @ v


def tensors(b=2, heads=4, kv_heads=4, t=16, width=8, of_values=None, dtype=torch.float64):
    """Queries, keys, values, and the gradient of the output; heads lie between positions and widths, as in models."""
    torch.manual_seed(b + heads + t)
    widths = width, width, of_values or width, of_values or width
    numbers = heads, kv_heads, kv_heads, heads
    return [torch.randn(b, t, n, w, dtype=dtype).transpose(1, 2) for n, w in zip(numbers, widths, strict=True)]


def of_world(way, t):
    """The part of a sequence of ``t`` tokens of this rank, of all ranks."""
    ranks = Ranks(list(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    return ContextAttention(ranks, way, t, torch.device("cpu"))


def leaves(given, part=None):
    return [(x if part is None else x[:, :, part.positions]).detach().clone().requires_grad_() for x in given]


def compared(part, given, options, attend=None):
    """The largest errors of the output and of the three gradients, relative to the largest number, or to 0.1."""
    *qkv, grad = given
    whole, local = leaves(qkv), leaves(qkv, part)
    expected = plain(*whole, **options)
    expected.backward(grad)
    if (documents := options.get("documents")) is not None:
        options = {**options, "documents": documents[:, part.positions]}
    out = (attend or part.attend)(*local, **options)
    out.backward(grad[:, :, part.positions])
    pairs = [(out, expected), *((mine.grad, whole.grad) for mine, whole in zip(local, whole, strict=True))]
    return [
        ((mine - all_[:, :, part.positions]).abs().max() / all_.abs().max().clamp(min=0.1)).item()
        for mine, all_ in pairs
    ]


def errors_of_cases(way):
    found = {}
    for name, case in CASES.items():
        case, sizes = dict(case), {}
        for key in ("b", "heads", "t", "width", "of_values"):
            if key in case:
                sizes[key] = case.pop(key)
        given = tensors(**sizes)
        if "documents" in case:
            case["documents"] = torch.tensor(case["documents"])
        found[name] = compared(of_world(way, given[0].shape[2]), given, case)
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_gradients_are_those_of_one_process(ranks, way, world):
    for found in ranks.run(world, errors_of_cases, way):
        assert found.keys() == CASES.keys()
        assert max(itertools.chain(*found.values())) <= 1e-12, found


def second_half_of_heads(count, shape, samples):
    return {1: Part(range(count, 2 * count), 2 * count)}


def errors_with_dropout(way):
    """Errors with the masks that one process draws for all positions and heads."""
    found = {}
    for name, case in {"plain": {}, "all": CASES["all at once"]}.items():
        options = {key: value for key, value in case.items() if key not in ("heads", "documents")}
        if "documents" in case:
            options["documents"] = torch.tensor(case["documents"])
        given = tensors(heads=case.get("heads", 4))
        dropout = Dropout(0.3)
        dropout.full_name = "h.0.attention"
        with computing(Samples(count=2, first=5, seed=3, step=1)):
            torch.manual_seed(0)
            keep = dropout(torch.ones(2, 2 * given[0].shape[1], 16, 16, dtype=torch.float64)).chunk(2, 1)[1]
        # Of twice as many heads this rank has the second half, as under tensor parallelism.
        dropout.part = partial(second_half_of_heads, given[0].shape[1])
        assert 0.5 < (keep > 0).double().mean() < 0.9
        part = of_world(way, 16)

        def attend(*qkv, keep, dropout=dropout, part=part, **options):
            torch.manual_seed(0)
            return part.attend(*qkv, dropout=dropout, **options)

        def recomputed(*qkv, attend=attend, **options):
            return checkpoint(attend, *qkv, use_reentrant=False, **options)

        for how in (attend, recomputed):
            with computing(Samples(count=2, first=5, seed=3, step=1)):
                found[name, how.__name__] = compared(part, given, {**options, "keep": keep}, how)
        evaluated = compared(part, given, options, partial(part.attend, dropout=dropout.eval()))
        found[name, "evaluated"] = evaluated
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_that_of_one_process(ranks, way, world):
    for found in ranks.run(world, errors_with_dropout, way):
        assert len(found) == 6
        assert max(itertools.chain(*found.values())) <= 1e-12, found


def errors_in_groups(way):
    """Ranks 0 and 2 share a sequence, and ranks 1 and 3 another one."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    index, which = divmod(dist.get_rank(), 2)
    part = ContextAttention(Ranks([which, which + 2], index, groups[which]), way, 16, torch.device("cpu"))
    return compared(part, tensors(heads=8 + 4 * which), {})


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_one_group_among_others_share_a_sequence(ranks, way):
    for found in ranks.run(4, errors_in_groups, way):
        assert max(found) <= 1e-12


def errors_with_messages(way, early):
    """Every message has arrived before its round's blocks are computed, or arrives after them."""
    sent = dist.batch_isend_irecv

    def slow(operations):
        works = sent(operations)
        if early:
            time.sleep(0.05)
        else:
            dist.barrier()
        return works

    dist.batch_isend_irecv = slow
    try:
        return [compared(of_world(way, 16), tensors(), case) for case in ({}, {"window": 9})]
    finally:
        dist.batch_isend_irecv = sent


def test_keys_are_not_overwritten_while_a_block_reads_them(ranks):
    for found in ranks.run(4, errors_with_messages, "ring", True):
        assert max(itertools.chain(*found)) <= 1e-12


def of_graph(way):
    """Errors under activation checkpointing, of a second backward, of gradients that are one number, of strided heads;
    and what a derivative of the gradients ends in."""
    part, given, found = of_world(way, 16), tensors(heads=8), {}
    for name, options in {"causal": {}, "window": {"window": 6}}.items():
        found[f"recomputed {name}"] = compared(
            part, given, options, lambda *qkv, **options: checkpoint(part.attend, *qkv, use_reentrant=False, **options)
        )
        local, grad = leaves(given[:3], part), given[3][:, :, part.positions]
        out = part.attend(*local, **options)
        out.backward(grad, retain_graph=True)
        once = [x.grad.clone() for x in local]
        out.backward(grad)
        found[f"twice {name}"] = [(x.grad - 2 * g).abs().max().item() for x, g in zip(local, once, strict=True)]
        *qkv, grad = given
        found[f"expanded {name}"] = compared(part, (*qkv, torch.ones(()).expand(grad.shape)), options)
        strided = [x.mT.contiguous().mT for x in given]
        found[f"strided {name}"] = compared(
            part, strided, options, lambda *qkv, **o: part.attend(*(x.mT.contiguous().mT for x in qkv), **o)
        )
    local = leaves(given[:3], part)
    try:
        (dq,) = torch.autograd.grad(part.attend(*local).sum(), local[0], create_graph=True)
        dq.sum().backward()
    except (RuntimeError, PlanError) as error:
        return found, str(error)
    return found, None


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_is_recomputed_and_used_twice(ranks, way):
    for found, error in ranks.run(2, of_graph, way):
        assert len(found) == 8
        assert max(itertools.chain(*found.values())) <= 1e-12, found
        assert re.search("derivative|gradients of gradients", str(error))


def errors_of_frozen(way):
    found = {}
    part, (*qkv, grad) = of_world(way, 16), tensors()
    whole = leaves(qkv)
    plain(*whole).backward(grad)
    for moving in itertools.product((True, False), repeat=3):
        if any(moving):
            local = [x.requires_grad_(moves) for x, moves in zip(leaves(qkv, part), moving, strict=True)]
            part.attend(*local).backward(grad[:, :, part.positions])
            found[moving] = [
                math.nan
                if (x.grad is not None) != moves
                else (x.grad - w.grad[:, :, part.positions]).abs().max().item()
                for x, w, moves in zip(local, whole, moving, strict=True)
                if moves or x.grad is not None
            ]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_frozen_queries_keys_and_values_get_no_gradient(ranks, way):
    for found in ranks.run(2, errors_of_frozen, way):
        assert len(found) == 7
        assert all(error <= 1e-12 for errors in found.values() for error in errors), found


def kept_bytes(attend, qkv):
    """The bytes that a forward keeps for its backward."""
    kept = {}

    def note(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        out = attend(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv))
        note(out.transpose(1, 2).flatten(2))  # the next layer's input
    return sum(kept.values())


def kept(way):
    qkv = [x.requires_grad_() for x in tensors(heads=8, t=64)[:3]]
    part = of_world(way, 64)
    whole = kept_bytes(
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True), qkv
    )
    return kept_bytes(part.attend, [x[:, :, part.positions] for x in qkv]) / whole


# Attention of ulysses keeps the outputs of some heads, and the next layer those of some positions.
@pytest.mark.parametrize("way, most", [("gather", 0.51), ("ring", 0.51), ("ulysses", 0.67)])
def test_a_rank_keeps_its_part_of_the_activations(ranks, way, most):
    for share in ranks.run(2, kept, way):
        assert 0.49 <= share <= most


def sent_numbers(way):
    """The numbers that this rank sends to others in forward and backward, and the calls that send them."""
    n, sent = dist.get_world_size(), []
    originals = dist.all_gather, dist.all_to_all_single, dist.batch_isend_irecv

    def all_gather(received, x, *args, **kwargs):
        sent.append((n - 1) * x.numel())
        return originals[0](received, x, *args, **kwargs)

    def all_to_all_single(received, x, *args, **kwargs):
        sent.append((n - 1) * x.numel() // n)
        return originals[1](received, x, *args, **kwargs)

    def batch_isend_irecv(operations):
        sent.append(sum(each.tensor.numel() for each in operations if each.op is dist.isend))
        return originals[2](operations)

    part, (*qkv, grad) = of_world(way, 16), tensors(b=3, heads=8, width=6)
    local = leaves(qkv, part)
    dist.all_gather, dist.all_to_all_single, dist.batch_isend_irecv = all_gather, all_to_all_single, batch_isend_irecv
    try:
        out = part.attend(*local)
        forward = list(sent)
        out.backward(grad[:, :, part.positions])
    finally:
        dist.all_gather, dist.all_to_all_single, dist.batch_isend_irecv = originals
    return forward, sent[len(forward) :]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_send_as_many_numbers_as_the_formulas_say(ranks, way, world):
    n, m, q, k, w, samples = world, 16 // world, 8, 4, 6, 3
    keys = samples * 2 * m * k * w
    exchanges = [samples * (n - 1) * m * heads * w // n for heads in (q, k, k, q)]
    expected = {
        "gather": ([(n - 1) * keys], [(n - 1) * keys] * 2),
        "ring": ([keys] * (n - 1), [keys] * (2 * n - 1)),
        "ulysses": (exchanges, exchanges),
    }[way]
    assert sum(exchanges) == samples * 2 * (n - 1) * m * (q + k) * w // n
    for forward, backward in ranks.run(world, sent_numbers, way):
        assert (sorted(forward), sorted(backward)) == (sorted(expected[0]), sorted(expected[1]))


def waited_for_a_rank_that_does_not_come(way):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        return None
    start = time.monotonic()
    part = ContextAttention(Ranks([0, 1], 0, group), way, 16, torch.device("cpu"))
    try:
        part.attend(*leaves(tensors()[:3], part))
    except RuntimeError:
        return time.monotonic() - start
    return math.inf


@pytest.mark.parametrize("way", with_slow(WAYS, WAYS[1:]))
def test_a_rank_that_does_not_come_is_waited_for_until_the_groups_timeout(ranks, way):
    waited, _ = ranks.run(2, waited_for_a_rank_that_does_not_come, way)
    assert 0.5 <= waited <= 20


def rounded(way):
    """Errors in bf16 and fp32 beside fp64, and in bf16 of torch's own attention; the dtypes of autocast."""
    part, given = of_world(way, 16), tensors(heads=8)
    whole = leaves(given[:3])
    plain(*whole).backward(given[3])
    expected = [plain(*whole), *(x.grad for x in whole)]

    def error(attend, dtype, which):
        local = [x[:, :, which].to(dtype).detach().requires_grad_() for x in given[:3]]
        out = attend(*local)
        out.backward(given[3][:, :, which].to(dtype))
        found = [out, *(x.grad for x in local)]
        assert all(x.dtype == dtype for x in found)
        return max((x - y[:, :, which]).abs().max().item() for x, y in zip(found, expected, strict=True))

    torchs = error(
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True),
        torch.bfloat16,
        range(16),
    )
    local = leaves([x.float() for x in given[:3]], part)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [part.attend(*local), part.attend(*local, window=3)]
    sum(outs).float().sum().backward()
    return (
        error(part.attend, torch.bfloat16, part.positions) / torchs,
        error(part.attend, torch.float32, part.positions),
        [outs[0].dtype, outs[1].dtype, local[0].grad.dtype],
    )


@pytest.mark.parametrize("way", WAYS)
def test_lower_precision_is_as_exact_as_torchs_own(ranks, way):
    for in_bf16, in_fp32, dtypes in ranks.run(4, rounded, way):
        assert in_bf16 <= 2
        assert in_fp32 <= 1e-5
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_chunks_and_positions_that_do_not_fit_are_refused():
    four = Ranks([0, 1, 2, 3], 1)
    with pytest.raises(PlanError, match="parallel.cp=4 cannot cut 20 positions into 8 equal chunks"):
        ContextAttention(four, "ring", 20, torch.device("cpu"))
    part = ContextAttention(four, "ulysses", 16, torch.device("cpu"))
    assert part.positions.tolist() == [2, 3, 12, 13]
    with pytest.raises(PlanError, match="attention gets 16 queries and 16 keys, not 4"):
        part.attend(*tensors()[:3])


@pytest.mark.parametrize(
    "options, computed",
    [
        ({"softcap": 1.0}, [(0, 0), (3, 0), (3, 1), (3, 2), (3, 3)]),
        ({"window": 1}, [(0, 0), (3, 3)]),
        ({"window": 2}, [(0, 0), (3, 2), (3, 3)]),
        ({"window": 6}, [(0, 0), (3, 1), (3, 2), (3, 3)]),
        ({"documents": [[0] * 4 + [1] * 4 + [2] * 8]}, [(0, 0), (3, 2), (3, 3)]),
        ({"documents": [[0] * 5 + [1] * 7 + [0] * 4]}, [(0, 0), (3, 0), (3, 1), (3, 3)]),
    ],
)
def test_blocks_in_which_no_query_sees_a_key_are_not_computed(options, computed):
    """Pairs of a chunk of queries and a chunk of keys, on the first of two ranks."""
    part = ContextAttention(Ranks([0, 1], 0), "ring", 16, torch.device("cpu"))
    if "documents" in options:
        options = {"documents": torch.tensor(options["documents"])}
    kernel = _Dense(part, **{"documents": None, "drawn": None, **options})
    pairs = [what[:2] for rank in (0, 1) for _, _, what in kernel.blocks(rank)]
    assert sorted((int(here[0]) // 4, int(there[0]) // 4) for here, there in pairs) == computed
