"""One formula for a rank's memory: mode=plan, parallel=auto, balance=size and the checks before a run agree."""

from functools import cache
from math import inf

import pytest
from cases import Layout, planned, pretend_gpus
from composed import compose, execute, plain

from common.errors import PlanError
from conf.instantiate import in_section, with_values
from models.toy import toy
from planner.here import Here, LayerSeconds, Line
from planner.memory import Memory, check_gpus, memory_of_ranks
from planner.work import weights_of
from training.reporting import console
from training.run import prepare as preparing
from training.run.checks import memory as memory_check
from training.studies.planning import choice

MODELS = {"toy": ("model=toy", "data.samples=40"), "gpt2": ("model=gpt2", "model.size=tiny", "data.seq_len=32")}
COMMON = ("train.global_batch_size=16", "device=cpu", "logger=none", "parallel.threads=1")
LAYOUTS = {
    "single": {},
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2},
    "pipelined gpipe": {"pp": 2, "schedule": "gpipe"},
    "pipelined 1f1b": {"pp": 2, "schedule": "1f1b"},
    "pipelined interleaved_1f1b": {"pp": 2, "schedule": "interleaved_1f1b"},
    "pipe_ddp": {"dp": 2, "pp": 2, "schedule": "gpipe"},
    "tensor": {"tp": 2},
    "pipe_fsdp tp": {"dp": 2, "pp": 2, "schedule": "1f1b", "tp": 2, "sequence": True},
}
# Three layers are no four stages.
CASES = [
    (model, layout)
    for model in MODELS
    for layout in LAYOUTS
    if model != "toy" or not ("interleaved" in layout or "tp" in LAYOUTS[layout])  # whose layers are not cut
]
# Some of GPT-2's layouts, the one of them that computes again with everything in it, and one of the toy's.
QUICK = [
    ("toy", "fsdp", False),
    *(("gpt2", layout, False) for layout in ("fsdp", "pipelined 1f1b", "pipe_ddp")),
    ("gpt2", "pipe_fsdp tp", True),
]
CHUNKS = 4
STATE = ("weights", "gradients", "optimizer")
PARTS = (*STATE, "gathered", "cast", "activations", "recomputed")


class Seen(Exception):
    """What a command has worked out is known, and it need not go on."""


@cache
def _composed(*words):
    return plain(compose(*words))


def composed(model, layout, recompute):
    """A configuration of one's own; Hydra composes one a strategy."""
    cfg = _composed(f"parallel={layout.split()[0]}", *MODELS[model], *COMMON)
    keys = in_section("parallel", {**LAYOUTS[layout], "chunks": CHUNKS})
    return with_values(cfg, {**keys, "train.activation_checkpointing": recompute})


def said_by_plan(cfg, folder, monkeypatch) -> list[Memory]:
    """What mode=plan shows of each rank."""
    with monkeypatch.context() as patched:
        patched.setattr(console, "describe_memory", lambda ranks: shown.extend(ranks) or "")
        shown: list[Memory] = []
        execute(with_values(cfg, {"mode": "plan"}), folder, None)
    return shown


def said_by_auto(cfg, monkeypatch) -> Memory:
    """What a search predicts of the fullest rank of the layout with ``CHUNKS`` micro-batches."""

    def measured(subject, processes, least, most) -> Here:
        layers = tuple(LayerSeconds(name, *[Line(1.0)] * 4) for name in subject.chain.names)
        messages = {name: Line() for name in ("gpipe", "1f1b", "interleaved_1f1b")}
        return Here(processes, 1, layers, step=0.1, update=Line(0.1), process=1, messages=messages)

    with monkeypatch.context() as patched:
        patched.setattr(choice, "measure", measured)
        patched.setattr(choice, "available_memory", lambda: 2.0**40)
        found, _ = choice.predict_here(with_values(cfg, {"parallel.chunks": "auto"}))
    (one,) = (one for one in found.best if one.layout.chunks == CHUNKS)
    return one.memory


def needed_by_check(cfg, folder, monkeypatch) -> float:
    """The bytes without which a run does not start."""

    def seen(needed, what, *words):
        if what.startswith("model="):  # and not a micro-batch
            sizes.append(needed)
            raise Seen

    sizes = []
    with monkeypatch.context() as patched, pytest.raises(Seen):
        patched.setattr(memory_check, "check_memory", seen)
        execute(cfg, folder, None)
    return sizes[0]


def costs_of_balance(cfg, monkeypatch) -> list[float]:
    """What parallel.balance=size makes equal."""

    def seen(costs, *numbers):
        found.extend(costs)
        raise Seen

    found = []
    with monkeypatch.context() as patched, pytest.raises(Seen):
        patched.setattr(preparing, "equal_stages", seen)
        preparing.prepare(cfg)
    return found


def parts(memory: Memory, names=PARTS) -> dict[str, int]:
    return {name: round(getattr(memory, name)) for name in names}


def memory_case(model, layout, recompute):
    slow = (model, layout, recompute) not in QUICK
    name = f"{model}-{layout}-{'recomputed' if recompute else 'kept'}"
    return pytest.param(model, layout, recompute, marks=[pytest.mark.slow] * slow, id=name)


@pytest.mark.parametrize(
    "model, layout, recompute", [memory_case(*case, again) for again in (False, True) for case in CASES]
)
def test_all_who_say_how_much_memory_say_the_same(tmp_path, monkeypatch, capsys, model, layout, recompute):
    cfg = composed(model, layout, recompute)
    planned = said_by_plan(cfg, tmp_path, monkeypatch)
    fullest = max(planned, key=lambda rank: rank.total)
    assert parts(said_by_auto(cfg, monkeypatch)) == parts(fullest)
    assert bool(fullest.recomputed) == recompute

    held = sum(rank.process + sum(parts(rank, STATE).values()) for rank in planned)
    assert needed_by_check(cfg, tmp_path, monkeypatch) == pytest.approx(held, abs=len(planned))

    plan = preparing.prepare(cfg).plan
    for rank, memory in enumerate(planned):
        stages = plan.stages_of(plan.mesh(rank).position)
        assert round(memory.weights) == round(4 * sum(stage.weights for stage in stages) / plan.shards / plan.tp)

    if plan.pipelined:
        costs = costs_of_balance(with_values(cfg, {"parallel.balance": "size"}), monkeypatch)
        ends = [sum(plan.balance[:i]) for i in range(len(plan.stages) + 1)]
        first = sum(sum(costs[ends[i] : ends[i + 1]]) for i in range(0, len(plan.stages), plan.pp))
        assert first == pytest.approx(planned[0].of_layers)


def test_more_ranks_than_gpus_have_memory_for(monkeypatch):
    pretend_gpus(monkeypatch, 1)
    chain = toy()

    def check(layout: Layout, states: int | None, memory: float) -> int:
        plan = planned(layout, chain, device="cuda")
        check_gpus(plan, memory_of_ranks(plan, weights_of(chain), states), lambda index: memory)
        return plan.parameters

    ddp, fsdp = Layout("ddp", dp=2, chunks=2), Layout("fsdp", dp=2, chunks=2)
    needed = 2 * 4 * 4 * check(ddp, 2, inf)  # ranks x tensors x bytes
    check(ddp, 2, needed)
    with pytest.raises(PlanError, match="ranks 0, 1 together need .* GiB of cuda:0 for weights, gradients"):
        check(ddp, 2, needed - 1)
    check(ddp, None, needed // 4)
    with pytest.raises(PlanError, match="for weights alone"):
        check(ddp, None, needed // 4 - 1)
    check(fsdp, 2, needed // 2)  # each rank holds half
    with pytest.raises(PlanError, match="ranks 0, 1 together need"):
        check(fsdp, 2, needed // 2 - 1)
