"""A new axis is one class in one file. This one has ranks that compute the same and compare their gradients."""

import json
import re
from functools import partial

import pytest
import torch
from commandline import train
from composed import compose, planned, steps
from slow_cases import slow
from torch import nn

from common.errors import PlanError, TrainingError
from conf.instantiate import use_code_of
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from parallel.axes.axis import Axis
from parallel.dtensor import local
from parallel.mesh import COPIES, REPLICAS

NAME = "tests.training.test_mirror"  # in the processes of a run


class Mirror(Axis):
    """Ranks that compute the same, and compare the bits of their gradients after every step."""

    @classmethod
    def describe(cls, layout):
        return "ranks mirror each other"

    def finish_gradients(self, names):
        gradients = [local(p.grad).flatten() for p in names if p.grad is not None]
        mine = torch.cat(gradients) if gradients else torch.zeros(0)
        for index, theirs in enumerate(self.ranks.all_gather(mine)):
            if not torch.equal(mine, theirs):
                raise TrainingError(f"rank {self.mesh.rank} differs from mirror {index}")


class Apart(Axis):
    """Ranks that complete the gradients of some parameters themselves."""

    def averaged_over(self, name):
        return {"net1.weight": (), "net2.bias": (COPIES,)}.get(name)

    def finish_gradients(self, names):
        for parameter, of in names.items():
            if (over := self.averaged_over(of[0])) is not None:
                own = self.mesh.axis(*{*REPLICAS} - {*over})
                gradients = own.all_gather(parameter.grad) if own.size > 1 else [parameter.grad]
                if own.size > 1 and torch.equal(*gradients):
                    raise TrainingError(f"the gradients of {of[0]} are averaged already")
                parameter.grad.copy_(sum(gradients))


class Astray(nn.Linear):
    """A layer that ranks do not compute alike."""

    def forward(self, x):
        import torch.distributed as dist

        return super().forward(x) * (1 + (dist.is_initialized() and dist.get_rank() % 2))


def astray(**_) -> Chain:
    return Chain([LayerSpec("layer", partial(Astray, 10, 5))], SquaredError())


TOY = ["model=toy", "logger=none", "train.epochs=null", "train.steps=4", "train.eval_every=2", "train.precision=fp64"]
TWO = f"parallel.axes={{mirror:{{_target_:{NAME}.Mirror,ranks:2}}}}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train([*TOY, "train.checkpoint_every=2"], tmp_path_factory.mktemp("mirror") / "run")


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    words = [*TOY, "train.checkpoint_every=2", "parallel=ddp", "parallel.dp=2", TWO]
    return train(words, tmp_path_factory.mktemp("mirror") / "run")


def test_a_run_has_twice_the_ranks_and_learns_the_same(alone, mirrored):
    assert mirrored.code == 0, mirrored.console
    assert "ranks mirror each other" in mirrored.stdout and mirrored.summary["world_size"] == 4
    assert mirrored.losses == pytest.approx(alone.losses, rel=1e-12)
    assert [step.get("val_loss") for step in steps(mirrored.folder)] == pytest.approx(
        [step.get("val_loss") for step in steps(alone.folder)], rel=1e-12
    )


@pytest.mark.parametrize(
    "layout", [["parallel=pipelined", "parallel.chunks=2"], slow(["parallel=fsdp", "parallel.dp=2"])]
)
def test_it_combines_with_other_strategies(alone, layout, tmp_path):
    run = train([*TOY, *layout, TWO], tmp_path / "run")
    assert run.code == 0, run.console
    assert run.losses == pytest.approx(alone.losses, rel=1e-12)


HIERARCHICAL = ["parallel=ddp", "parallel.comm_hook=hierarchical", "parallel.shard=2"]  # no copies, two peers
SPLIT = ["parallel=pipe_ddp", "parallel.schedule=planned", "parallel.stages_per_rank=1", "parallel.chunks=2"]


@pytest.mark.parametrize("layout", [["parallel=ddp"], slow(HIERARCHICAL), slow(SPLIT)], ids=" ".join)
def test_who_averages_is_asked_per_parameter(alone, layout, tmp_path):
    run = train([*TOY, *layout, "parallel.dp=2", TWO.replace("Mirror", "Apart")], tmp_path / "run")
    assert run.code == 0, run.console
    assert run.losses == pytest.approx(alone.losses, rel=1e-12)


def test_sharded_parameters_are_averaged_by_all_replicas(tmp_path):
    run = train([*TOY, "parallel=fsdp", "parallel.dp=2", TWO.replace("Mirror", "Apart")], tmp_path / "run")
    assert run.code != 0 and "parallel=fsdp shards all parameters" in run.console, run.console


def test_a_rank_that_computes_something_else_is_named(tmp_path):
    run = train([*TOY, f"model._target_={NAME}.astray", TWO], tmp_path / "run")
    assert run.code != 0 and re.search(r"rank \d differs from mirror \d", run.console), run.console


def test_it_resumes_from_one_process_and_one_process_from_it(alone, mirrored, tmp_path):
    more = [word.replace("train.steps=4", "train.steps=6") for word in TOY]
    there = train([*more, "parallel=ddp", "parallel.dp=2", TWO, f"train.resume={alone.folder}"], tmp_path / "there")
    back = train([*more, f"train.resume={mirrored.folder}"], tmp_path / "back")
    assert there.code == back.code == 0, there.console + back.console
    assert len(there.losses) == 2 and there.losses == pytest.approx(back.losses, rel=1e-12)


def test_the_plan_names_it(tmp_path):
    run = train([*TOY, "mode=plan", "parallel=ddp", "parallel.dp=2", TWO], tmp_path / "run")
    assert run.code == 0 and "4 processes on cpu" in run.stdout and "ranks mirror each other" in run.stdout, run.console


@pytest.mark.slow
def test_an_automatic_layout_keeps_it(tmp_path):
    run = train([*TOY, "parallel=auto", TWO], tmp_path / "run")
    assert run.code == 0, run.console
    assert "parallel.axes.mirror.ranks=2" in run.stdout and "ranks mirror each other" in run.stdout
    assert json.loads((run.folder / "summary.json").read_text())["world_size"] % 2 == 0


@pytest.mark.slow
def test_verification_compares_it_with_one_process(tmp_path):
    run = train([*TOY, "mode=verify", "parallel=ddp", "parallel.dp=2", TWO], tmp_path / "run")
    assert run.code == 0, run.console
    assert re.search(r"parallel=ddp dp=2 mirror=2: largest difference", run.stdout)


REFUSED = {
    "tensor:{_target_:PATH.Mirror,ranks:2}": "parallel.axes.tensor has the name of an axis of this program",
    "chunks:{_target_:PATH.Mirror,ranks:2}": "parallel.axes.chunks has the name",
    "mirror:{_target_:PATH.Mirror,ranks:0}": "a number of at least 1",
    "mirror:{_target_:PATH.Mirror,ranks:true}": "a number of at least 1",
    "mirror:{_target_:PATH.astray,ranks:2}": "a class",
    "1:{_target_:PATH.Mirror,ranks:2}": "must have a name",
    "mirror:{_target_:PATH.Mirror}": "the keys _target_, a class, and ranks",
    "mirror:{_target_:PATH.Astray,ranks:2}": "is not an axis",
}


def test_a_strategy_of_one_process_takes_no_axis(tmp_path):
    run = train([*TOY, "parallel=model_parallel", TWO], tmp_path / "run")
    assert run.code != 0 and "parallel=model_parallel runs in one process" in run.console


@pytest.mark.parametrize("section, words", REFUSED.items())
def test_what_is_no_axis_is_refused(section, words):
    with pytest.raises((PlanError, TrainingError), match=words):
        cfg = compose(f"parallel.axes={{{section.replace('PATH', NAME)}}}")
        use_code_of(cfg)
        planned(cfg)
