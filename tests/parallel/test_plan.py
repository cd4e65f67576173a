"""What follows from a layout: ranks, stages, groups and bubble; and what cannot run, refused with a way out.

What is refused in other words by the command line's own table (``tests/refusals/table.py``) is not said here.
"""

import itertools
import re
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from cases import Layout, planned, pretend_gpus

from common.errors import PlanError
from conf.composition import compose
from conf.schema import Schedule
from models.gpt2 import gpt2
from models.sequential import chain_of
from models.toy import toy
from parallel.devices import Hardware
from parallel.host_group import choose_backend
from parallel.plan import Plan
from parallel.schedules import SCHEDULES, ideal_bubble, in_flight
from parallel.strategies import STRATEGIES
from parallel.strategy import Strategy
from training.optimizer.kinds import states_of
from training.reporting.console import describe_plan
from training.run.checks.memory import certain_states


def plan(layout: Layout, chain=None, batch=24, **more) -> Plan:
    where = {key: more.pop(key) for key in ("world_size", "nodes", "hardware") if key in more}
    return planned(layout, chain or toy(), batch, where=where, **more)


def refused(layout: Layout, *parts: str, **more) -> str:
    """The error's message, which holds ``parts``."""
    with pytest.raises(PlanError) as error:
        plan(layout, **more)
    message = str(error.value)
    for part in parts:
        assert part in message
    return message


@pytest.mark.parametrize("pp, chunks", [(3, 7), (4, 9)])
def test_interleaved_chunks_that_make_no_equal_rounds_and_every_way_out_works(pp, chunks):
    chain = gpt2(size="tiny")
    layout = Layout("pipelined", pp=pp, chunks=chunks, schedule="interleaved_1f1b", stages_per_rank=1)
    message = refused(layout, f"parallel.pp={pp}", f"parallel.chunks={chunks}", chain=chain, batch=chunks)
    ways_out = [int(n) for n in re.search(r"the nearest that do are (\d+) and (\d+)", message).groups()]
    assert ways_out[0] < chunks < ways_out[1]
    assert all(n % max(1, n // pp) for n in range(ways_out[0] + 1, ways_out[1])), "others are nearer"
    for n in ways_out:
        layout = Layout("pipelined", pp=pp, chunks=n, schedule="interleaved_1f1b", stages_per_rank=1)
        assert plan(layout, chain, batch=n).chunks == n


def test_replicas_left_open_are_as_many_as_the_started_processes_allow_and_two_on_a_cpu():
    open_layout = Layout("pipe_ddp", dp=None, pp=2, chunks=2)
    assert plan(open_layout, world_size=6).dp == 3
    assert plan(open_layout).dp == 2


@pytest.mark.parametrize(
    "hardware, names, words",
    [
        (Hardware("cuda", 2), ["cuda:0", "cpu"], "names cpu, but all devices of a run must be of the type cuda"),
        (Hardware("cuda", 2), ["cuda:0", "cuda:2"], "names cuda:2, but"),
        (Hardware("cpu"), ["cpu", "cuda:0"], "of the type cpu"),
        (Hardware("cpu"), ["cpu", "gpu"], "names gpu, but"),
    ],
)
def test_devices_of_several_kinds(hardware, names, words):
    refused(Layout("model_parallel", pp=2), words, hardware=hardware, devices=names)


@pytest.mark.parametrize("names", [["cuda:0", "cuda:1"], ["cuda", "cuda:0"]])
def test_devices_of_one_kind(names):
    assert plan(Layout("model_parallel", pp=2), hardware=Hardware("cuda", 2), devices=names).devices == tuple(names)


def test_more_ranks_than_gpus(monkeypatch):
    pretend_gpus(monkeypatch, 3)
    shared = plan(Layout("pipe_ddp", dp=2, pp=2, chunks=2), device="cuda")
    assert shared.shares_gpus and not plan(Layout("ddp", dp=2, chunks=2), device="cuda").shares_gpus
    data = SimpleNamespace(description="", unigram_entropy=None, seq_len=None)
    cfg = SimpleNamespace(mode="train", model=SimpleNamespace(name="toy"), train=SimpleNamespace(eval_every=None))
    described = describe_plan(SimpleNamespace(plan=shared, cfg=cfg, data=data, shares=None))
    assert "4 processes share 3 GPUs: tensors between them go through main memory" in described


@pytest.mark.parametrize(
    "gpus, backend",
    [
        ([("NVIDIA H100", "a"), ("NVIDIA H100", "b")], "nccl"),
        ([("NVIDIA H100", "a"), ("NVIDIA H100", "a")], "host"),
        ([("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a"), ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "b")], "host"),
    ],
)
def test_nccl_is_for_ranks_with_whole_gpus_of_their_own(monkeypatch, gpus, backend):
    gpus = [SimpleNamespace(name=name, uuid=uuid) for name, uuid in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = torch.distributed.HashStore()
    store.set("gpu-1", "MIG" if "MIG" in gpus[1].name else gpus[1].uuid)  # what rank 1 tells
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[0])
    assert choose_backend("cuda", 0, 2, 0, store)[0] == backend


@pytest.mark.parametrize(
    "section, least, likely",
    [
        ({"_target_": "torch.optim.AdamW"}, 2, 2),
        ({"_target_": "torch.optim.SGD", "momentum": 0.9}, 1, 1),
        ({"_target_": "torch.optim.Adafactor"}, 0, 0),
        ({"_target_": "lion.Lion"}, 0, 2),
        ({"_target_": "mine.AdamW"}, 0, 2),
    ],
)
def test_of_an_unknown_optimizer_only_weights_and_gradients_are_certain(section, least, likely):
    assert certain_states(SimpleNamespace(mode="train", optim=section)) == least
    assert certain_states(SimpleNamespace(mode="eval", optim=section)) is None
    assert states_of(section) == likely


def test_more_stages_in_one_process_than_gpus(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    assert plan(Layout("model_parallel", pp=3), device="cuda").devices == ("cuda:0", "cuda:1", "cuda:0")


def test_a_run_for_another_machine_counts_on_its_gpus(monkeypatch):
    """A login node has other devices, or none: nothing is asked of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("this machine was asked"))
    elsewhere = plan(Layout("ddp", dp=None, chunks=1), device="auto", precision="auto", hardware=Hardware("cuda", 4))
    assert (elsewhere.device_type, elsewhere.dp, elsewhere.precision) == ("cuda", 4, "auto")
    copies = plan(Layout("data_parallel"), device="auto", hardware=Hardware("cuda", 2))
    assert copies.devices == ("cuda:0", "cuda:1")


# -- strategies and schedules ------------------------------------------------------------------------------------------


def test_strategies_and_schedules_are_those_of_the_configuration():
    options = list((Path(__file__).resolve().parents[2] / "conf" / "parallel").glob("*.yaml"))
    assert {compose([f"parallel={path.stem}"]).parallel.name for path in options} == {*STRATEGIES, "auto"}
    assert all(issubclass(resolve_name(info.class_path), Strategy) for info in STRATEGIES.values())
    assert [schedule.value for schedule in Schedule] == [*SCHEDULES]


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "planned"])
def test_the_ideal_bubble_of_a_backward_in_two_parts(schedule):  # of the others: test_simulation
    assert ideal_bubble(schedule, 2, 4, 2) == pytest.approx(1 / 25)


def test_1f1b_holds_fewer_micro_batches_than_gpipe_and_fewest_at_the_end_and_none_more_than_there_are():
    assert [in_flight("gpipe", 4, 8, 1, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight("1f1b", 4, 8, 1, rank) for rank in range(4)] == [4, 3, 2, 1]
    for schedule, chunks, rank in itertools.product(SCHEDULES, (2, 3, 4, 8), range(2)):
        assert 1 <= in_flight(schedule, 2, chunks, 1 + SCHEDULES[schedule].looped, rank) <= chunks


# -- groups of replicas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, nodes, words",
    [
        (Layout("hsdp", dp=4, shard=3), 1, "parallel.shard=3 does not divide parallel.dp=4 replicas into equal groups; "
                                           "possible sizes are 2, 4"),
        (Layout("hsdp", dp=4), 4, "shares nothing (each of 4 nodes has one); set parallel.shard=4"),
        (Layout("hsdp", dp=6), 4, "the 6 replicas are not divided equally among the 4 nodes; set parallel.shard"),
        (Layout("fsdp", dp=4, shard=1), 1, "shares nothing (parallel.shard=1); set parallel.shard=4"),
        (Layout("ddp", dp=4, shard=2), 1, "parallel.shard=2 is a size of groups, but parallel=ddp has none"),
        (Layout("ddp", dp=4, reshard=True), 1, "parallel.reshard=true needs parallel=fsdp or"),
        (Layout("fsdp", dp=4, comm_hook="bf16"), 1, "parallel.comm_hook=bf16 needs replicas with parameters of"),
        (Layout("fsdp", dp=4, comm_hook="hierarchical"), 1, "parallel=hsdp reduces gradients that way by itself"),
        (Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="planned", reshard=True), 1,
         "parallel.reshard=true is not supported with parallel.schedule=planned"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused_with_the_numbers(layout, nodes, words):
    refused(layout, words, chain=gpt2(size="tiny", n_layer=4), nodes=nodes)


@pytest.mark.parametrize(
    "layout, nodes, group",
    [
        (Layout("fsdp", dp=4), 2, 4),
        (Layout("hsdp", dp=4), 1, 4),
        (Layout("hsdp", dp=4), 2, 2),
        (Layout("pipe_fsdp", dp=4, pp=2), 2, 4),
        (Layout("ddp", dp=4, comm_hook="hierarchical"), 2, 2),
        (Layout("pipe_ddp", dp=4, pp=2, comm_hook="hierarchical"), 2, 2),  # two pipelines on each node
        (Layout("pipe_ddp", dp=4, pp=2, order="pp_dp", comm_hook="hierarchical"), 2, 4),  # a node for each stage
        (Layout("ddp", dp=4), 2, 1),
    ],
    ids=str,
)
def test_groups_are_all_replicas_or_those_of_a_node(layout, nodes, group):
    assert plan(layout, gpt2(size="tiny"), nodes=nodes).group == group


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def test_a_parameter_without_rows_is_refused_by_name():
    chain = chain_of(torch.nn.Sequential(torch.nn.Linear(10, 5), Scale()), toy().loss)
    refused(
        Layout("fsdp", dp=2), "parallel=fsdp shares the rows of each parameter, but ", "factor is a single", chain=chain
    )
