"""A layout is the same value however it is written: as a section, as words, in a manifest."""

import json
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest

from conf.composition import compose
from conf.instantiate import to_config, to_dict
from models.gpt2 import gpt2
from models.toy import toy
from parallel.layout import Layout
from parallel.plan import Plan
from parallel.planning import make_plan

LAYOUTS = [
    Layout(chunks=3),
    Layout("model_parallel", pp=2, balance=(2, 1), devices=("cpu", "cpu")),
    Layout("ddp", dp=4),
    Layout("hsdp", dp=4, shard=2, order="pp_dp"),
    Layout("fsdp", dp=2, reshard=False),
    Layout("pipelined", pp=2, chunks=2, schedule="interleaved_1f1b", stages_per_rank=3),
    Layout("pipe_ddp", dp=2, pp=3, chunks=4, schedule="1f1b"),
]


def section(*words: str):
    return to_config(to_dict(compose(words).parallel))


def with_layout(layout: Layout):
    return SimpleNamespace(**{**section("parallel=single"), **layout.section()})


def plan(parallel) -> Plan:
    return make_plan(parallel, gpt2(size="tiny"), global_batch_size=24, device="cpu", precision="fp32")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_is_written_into_a_section_is_read_from_it(layout):
    assert Layout.of(SimpleNamespace(**layout.section())) == layout


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_words_set_what_a_planner_chooses(layout):
    typed = section(*layout.words(), *[f"parallel.pp={layout.pp}"] * (layout.strategy == "model_parallel"))
    assert typed.items() >= layout.keys().items()


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if not one.devices], ids=lambda layout: layout.name)
def test_a_plan_is_a_layout_which_plans_the_same_again(layout):
    planned = plan(with_layout(layout))
    assert plan(with_layout(planned)) == planned == Plan.from_json(json.loads(json.dumps(asdict(planned))))
    assert (planned.processes, planned.group, planned.shards) == (layout.processes, layout.group, layout.shards)
    read = Layout.from_manifest(planned.manifest())
    assert read.keys() == layout.keys()
    assert [len(stage.layers) for stage in planned.stages] == [*read.counts]


def test_single_leaves_no_key_that_one_process_does_not_take():
    everything = {
        "name": "pipe_fsdp", "dp": 2, "pp": 2, "chunks": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2,
        "balance": [1, 1, 1, 0], "order": "pp_dp", "shard": 2, "reshard": True, "devices": ["cpu", "cpu"],
        "tp": 2, "sequence": True, "ep": 2, "cp": 2, "context": "ring",
        "axes": {"mirror": {"_target_": "mine.Mirror", "ranks": 2}},
    }  # fmt: skip
    assert everything.keys() == {"name", *(key.name for key in fields(Layout))} - {"strategy"}
    parallel = SimpleNamespace(**{**section("parallel=single"), **everything, **Layout().section()})
    alone = make_plan(parallel, toy(), global_batch_size=1, device="cpu", precision="fp32", world_size=1)
    assert alone.processes == len(alone.stages) == 1


def test_a_manifest_without_a_schedule_says_nothing_of_it():
    saved = {"parallel": "pipelined", "dp": 1, "pp": 2, "chunks": 4, "stages": [["a"], ["b"]]}
    read = Layout.from_manifest(saved)
    assert read.keys() == {"name": "pipelined", "dp": 1, "pp": 2, "chunks": 4}
    assert read.words() == ["parallel=pipelined", "parallel.pp=2", "parallel.chunks=4"]
    assert read.name == "pipelined pp=2 chunks=4"
