"""mode=verify: broken models are named with their layer and reason, broken strategies with the first difference."""

import json
import os
import random
import signal
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from commandline import Started, wait_until
from composed import plain
from slow_cases import with_slow
from zoo import DDP, PIPE, SMALLER, WHOLE, ZOO, Coin, Last, RoundsLargeBatches, chain, elsewhere, layer, tied

from common.errors import UserError
from launchers import Interrupted
from models.chain import Chain, LayerSpec
from models.given import set_given
from models.losses import ClassCrossEntropy, Sums, gather
from parallel.axes.experts import ExpertParallel
from parallel.axes.tensor import TensorParallel
from parallel.gradients import _copies
from parallel.layout import Layout
from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES
from parallel.strategy import LocalStrategy, Strategy
from train import main
from training import load_config, verify
from training.command.api import with_given
from training.run.prepare import prepare
from training.studies.verification import layouts as verified
from training.studies.verification import probes
from training.studies.verification.layouts import _SPREADS, in_layout, layouts, limits_of, typed_name
from training.studies.verification.probes import probe
from training.studies.verification.recording import perturbed
from training.studies.verification.report import _single

generator = torch.Generator().manual_seed(0)
DATA = torch.randn(32, 8, generator=generator), torch.randint(0, 3, (32,), generator=generator)
WORDS = ("logger=none", "train.global_batch_size=8", "train.precision=fp64", "device=cpu", "verify.timeout_s=30")


def findings(model, own=0):
    from data.tensors import TensorData

    objects = {"model": model, "data": TensorData(*DATA)}
    set_given(objects)
    try:
        cfg = with_given(load_config(*WORDS, "parallel=single"), objects)
        return list(probe(prepare(cfg), own))
    finally:
        set_given(None)


@pytest.mark.parametrize("broken", [one for one in ZOO if one.probe], ids=lambda broken: broken.name)
def test_a_broken_model_is_named_with_its_layer_and_the_reason(broken):
    found = findings(broken.chain())
    named = [one for one in found if one.probe == broken.probe and one.layer.split(" ")[0] == broken.layer]
    assert any(broken.reason in one.text and not one.holds for one in named), found


def test_a_difference_is_relative_to_the_largest_number_and_absolute_where_all_are_zero():
    assert probes.difference(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -4.0])) == 0.25
    assert probes.difference(torch.tensor(0.5), torch.tensor(0.0)) == 0.5  # an accuracy


def test_a_limit_is_a_multiple_of_the_tensors_own_difference_or_of_the_usual_one():
    theirs = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    moved = [{"a": torch.tensor([1.0, 1.5]), "b": torch.tensor([1.0, 1.01]), "c": torch.ones(2)}]
    moved.append({**moved[0], "a": torch.tensor([1.0, 1.25])})
    limits = limits_of(theirs, moved, 1e-5)
    assert limits == pytest.approx(
        {"a": _SPREADS * 0.5, "b": _SPREADS * 0.01, "c": _SPREADS * 0.01, "": _SPREADS * 0.01}
    )
    assert limits_of(theirs, [], 1e-5) == {"": 1e-5}


def test_rounding_moves_what_modules_return_and_neither_numbers_nor_the_lowest_number_of_a_mask():
    low = torch.finfo(torch.bfloat16).min
    for dtype, eps in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-7)):
        layer, x = torch.nn.Identity(), torch.ones(1000, dtype=dtype)
        with perturbed("fp16" if dtype == torch.float16 else "bf16", seed=1):
            gap, whole = (layer(x).double() - 1).abs(), torch.nn.Sequential(layer)
            assert 0.1 * eps < gap.mean() < gap.max() <= eps
            assert layer(torch.tensor(1.0)) == 1 and layer(torch.tensor([3])) == 3
            assert layer(torch.full((9,), low, dtype=torch.bfloat16)).isfinite().all()
            assert (whole(x).double() - 1).abs().max() <= eps  # a module with children adds nothing
        assert torch.equal(layer(x), x)


def test_a_sound_model_has_no_findings():
    assert not any(found.text for found in findings(chain()))


def test_a_coin_is_named_and_never_taken_for_samples_that_see_each_other():
    hidden = random.Random(0).random
    for source in (hidden, random.random, lambda: 1 + random.random()):  # the last one never falls on the other side
        found = findings(chain(partial(Coin, source)))
        assert [(one.probe, one.layer) for one in found if one.text] == [("repeats", "b (Coin)")], found


Noise = layer("Noise", lambda self, x: x + torch.randn_like(x))
NoiseInEvaluation = layer("NoiseInEvaluation", lambda self, x: x if self.training else x + torch.randn_like(x))
InFours = layer("InFours", lambda self, x: x.view(-1, 4, 8).tanh().view(-1, 8))


class NoisyLoss(ClassCrossEntropy):
    def __call__(self, output, targets, weights):
        return super().__call__(output + torch.randn_like(output), targets, weights)


class Gathering(ClassCrossEntropy):
    def __call__(self, output, targets, weights):
        sums = super().__call__(gather(output), gather(targets), weights)
        return Sums(sums.loss * sums.count, *sums[1:])


SEEDED = "draws random numbers from torch's generator: seeded for each micro-batch"
BY_RULE = {
    "a layer": (partial(chain, Noise), "halves", "b (Noise)", SEEDED),
    "a layer in evaluation": (partial(chain, NoiseInEvaluation), "halves", "b (NoiseInEvaluation)", SEEDED),
    "a loss": (partial(chain, loss=NoisyLoss()), "halves", "c (Last)", f"loss NoisyLoss {SEEDED}"),
    "all replicas": (partial(chain, loss=Gathering()), "halves", "c (Last)", "gathers the samples of all replicas"),
}


@pytest.mark.parametrize("model, name, layer, text", BY_RULE.values(), ids=BY_RULE)
def test_what_is_seeded_or_gathered_is_a_finding_by_rule_that_is_said_once(model, name, layer, text):
    (found,) = [one for one in findings(model()) if one.text]
    assert (found.probe, found.layer, found.text.partition(" (by")[0], found.holds) == (name, layer, text, True)


def test_as_many_samples_as_the_run_has_in_a_micro_batch_are_computed_at_once(tmp_path, monkeypatch):
    words = ("logger=none", "device=cpu", "verify.processes=1", "verify.steps=1", f"hydra.run.dir={tmp_path}/v")
    model = chain(partial(RoundsLargeBatches, 8))
    report = verify(*words, model=model, data=DATA)  # the batch of a step is 64, that of the verification 8
    assert ["in a batch of 64" in one.text for one in report.failed] == [True, True], report
    monkeypatch.setattr(probes, "_PATIENCE_S", 0.0)
    found = [one for one in findings(model, 32) if one.text]
    assert [one.holds for one in found] == [True] and "a (Linear): no batch of 32 was computed" in str(found[0]), found
    monkeypatch.setattr(probes, "available_memory", lambda: 0.0)
    assert "no batch of 8 was computed" in str([str(one) for one in findings(model, 32)])


class Scaled(torch.nn.Module):
    """Passes on a number that all samples are multiplied by."""

    def forward(self, x, scale=None):
        if scale is None:
            return x, x.new_ones(()) * self.weight
        return x * scale

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))


def test_the_gradient_of_a_number_that_all_samples_share_is_no_finding():
    layers = [LayerSpec("a", partial(torch.nn.Linear, 8, 8)), LayerSpec("b", Scaled), LayerSpec("b2", Scaled)]
    found = findings(Chain([*layers, LayerSpec("c", Last)], loss=ClassCrossEntropy()))
    assert not [one for one in found if not one.holds], found


def test_an_error_with_some_numbers_of_samples_is_a_finding():
    (found,) = [one for one in findings(chain(InFours)) if not one.holds]
    assert "b (InFours): some numbers of samples cannot be computed: RuntimeError: shape" in str(found)


def test_probes_end_when_the_process_is_told_to_stop(monkeypatch):
    monkeypatch.setattr(probes.stopping, "noted", lambda: signal.SIGTERM)
    with pytest.raises(Interrupted):
        findings(chain())


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)]
)
def test_a_verification_that_is_stopped_says_how_far_it_is_and_leaves_what_it_has(signum, code, tmp_path):
    words = ["mode=verify", "model=toy", "verify.processes=2", "verify.steps=1", "logger=none", "device=cpu"]
    certificate = tmp_path / "run" / "certificate.json"
    started = Started(words, tmp_path / "run")
    try:
        wait_until(lambda: certificate.exists() and json.loads(certificate.read_text())["layouts"], 120, "a layout")
        before = json.loads(certificate.read_text())  # what SIGKILL would leave
        assert not before["complete"] and not before["ok"] and before["probes"] and before["planned"] > 5
        started.process.send_signal(signum)
        run = started.wait()
    finally:
        started.kill()
    said = json.loads(certificate.read_text())
    reached = f"{len(said['layouts'])} of {said['planned']} layouts"
    assert run.code == code and reached in run.stderr, run.console
    assert f"partial: it ended after {reached}" in run.stdout, run.console
    assert run.stdout.count("parallel=single chunks=4  ") == 1, "no table"
    page = certificate.with_suffix(".html").read_text()
    assert "was not compared in every layout" in page and reached in page and "is the same" not in page


def test_every_strategy_and_every_schedule_is_a_layout():
    some = list(layouts(processes=4, microbatches=4))
    of_any_model = {name for name, info in STRATEGIES.items() if not info.degree}
    assert {layout.strategy for layout in some} == of_any_model - {"single"}
    every = layouts(processes=8, microbatches=4, divided=TensorParallel.variants)
    shared = [layout for layout in every if layout.ranks_per_stage > 1]
    assert {layout.strategy for layout in shared} == {
        name for name, info in STRATEGIES.items() if info.tensor and info.degree in ("", "tp")
    }
    assert {layout.sequence for layout in shared} == {False, True} and all(layout.processes <= 8 for layout in shared)
    shared = [layout for layout in layouts(8, 4, divided=ExpertParallel.variants) if layout.ep > 1]
    some_replicas = {
        name for name, info in STRATEGIES.items() if info.tensor and info.replicas and info.degree in ("", "ep")
    }
    assert {layout.strategy for layout in shared} == some_replicas
    assert "parallel=ddp dp=2 ep=2" in [typed_name(layout) for layout in shared]
    fewer = layouts(processes=4, microbatches=4, divided=TensorParallel.variants)
    assert all(layout.processes <= 4 for layout in fewer)
    assert {layout.schedule for layout in some if layout.strategy == "pipelined"} == set(SCHEDULES)
    names = [typed_name(layout) for layout in some]
    assert "parallel=hsdp dp=4 shard=2" in names and "parallel=pipe_fsdp dp=2 pp=2 schedule=1f1b" in names
    assert len(set(names)) == len(names)


def test_every_layout_of_a_sound_model_holds_and_the_certificate_says_so(tmp_path):
    report = verify(
        *WORDS, "verify.steps=2", "verify.processes=2", f"hydra.run.dir={tmp_path}/v", model=chain(), data=DATA
    )
    assert report.ok, report
    names = [outcome.name for outcome in report.compared]
    assert "parallel=single chunks=1" in names and report.complete
    for strategy in ("model_parallel", "ddp", "fsdp", "pipelined"):
        assert any(f"parallel={strategy}" in name for name in names), names
    said = json.loads((tmp_path / "v" / "certificate.json").read_text())
    assert (
        said["ok"] and max(one["differences"]["gradients"][0] for one in said["layouts"] if one["differences"]) < 1e-10
    )
    page = (tmp_path / "v" / "certificate.html").read_text()
    assert "is the same in every layout" in page and "http" not in page.replace("http-equiv", "")


def test_one_process_is_planned_whatever_was_typed_of_the_layout_to_compare():
    words = ("parallel=fsdp", "parallel.dp=2", "parallel.reshard=false", "parallel.order=pp_dp")
    cfg = plain(load_config("model=toy", *words, *WORDS))
    plan = prepare(in_layout(cfg, _single(cfg, chunks=2), steps=1)).plan
    assert (plan.strategy, plan.processes, plan.chunks, plan.order) == ("single", 1, 2, "pp_dp")


def test_a_configuration_of_a_program_is_verified_in_its_own_layout_and_batch(tmp_path):
    cfg = load_config("model=toy", "parallel=ddp", "parallel.dp=2", "device=cpu", "logger=none", "verify.steps=1")
    cfg.train.global_batch_size = 12
    report = verify(f"hydra.run.dir={tmp_path}/v", config=cfg)
    assert report.ok and [layout.name for layout in report.compared] == ["parallel=ddp dp=2"], report
    assert report.about["configuration"]["train"]["global_batch_size"] == 12


def test_a_layout_goes_on_from_the_last_right_one(tmp_path, monkeypatch):
    """The one before it may be wrong, which would make all that follow wrong."""
    begun, cfg = [], plain(load_config("model=toy", "verify.steps=1", "verify.processes=2", *WORDS))
    monkeypatch.setattr(verified, "prepare", Mock())
    runs = verified.Runs(cfg, tmp_path, chain(), 2)
    monkeypatch.setattr(runs, "launch", lambda result, folder, jobs: begun.append(jobs[-1][1].name))
    monkeypatch.setattr(runs, "results", lambda result, kind: {"loss": torch.tensor(1.0 + (result.name == "wrong"))})
    names = iter(("one", "right", "wrong", "next"))
    monkeypatch.setattr(verified, "typed_name", lambda layout, changed: next(names))
    found = [runs.compare(layout) for layout in (_single(cfg, 2), *[Layout("ddp", dp=2, pp=1, chunks=1)] * 3)]
    assert [one.holds for one in found] == [True, True, False, True]
    assert begun == ["one", "one", "right", "right"]


def test_a_layout_that_fails_runs_again_with_the_users_optimizer_too(tmp_path, monkeypatch):
    cfg = plain(load_config("model=toy", "verify.steps=1", "verify.processes=2", *WORDS))
    monkeypatch.setattr(verified, "prepare", Mock())
    runs = verified.Runs(cfg, tmp_path, chain(), 2)

    def launch(result, folder, jobs):
        runs._reused = True
        result.apart = "the ranks differ" * (result.layout.dp > 1 and "own" in [part for part, *_ in jobs])

    monkeypatch.setattr(runs, "launch", launch)
    monkeypatch.setattr(runs, "results", lambda result, kind: {"loss": torch.tensor(1.0)})
    found = [runs.compare(layout) for layout in (_single(cfg, 2), *[Layout("ddp", dp=2, pp=1, chunks=1)] * 2)]
    assert [one.holds for one in found] == [True, False, False]


def test_batchnorm_over_replicas_is_refused_with_what_to_compare(tmp_path):
    model = chain(partial(torch.nn.BatchNorm1d, 8))
    words = ("parallel=ddp", "parallel.dp=2", "parallel.sync_batchnorm=true", f"hydra.run.dir={tmp_path}/v")
    with pytest.raises(UserError, match="compare the losses of parallel.chunks=1 with those of parallel=single"):
        verify(*WORDS, *words, model=model, data=DATA)


@pytest.mark.slow
def test_the_rounding_of_partial_sums_in_bf16_is_no_difference(tmp_path):
    model = ("model=transformer", "model.d_model=32", "model.n_head=4", "model.d_hid=64", "model.n_layer=2")
    words = (*model, "data.seq_len=16", "parallel=tensor", "parallel.tp=2", "train.precision=bf16", "verify.steps=2")
    report = verify(*words, "device=cpu", "logger=none", f"hydra.run.dir={tmp_path}/v")
    one, *moved, tensor = report.layouts
    assert report.ok and [layout.perturbed for layout in moved] == [1, 2, 3], report
    assert report.compared == [tensor] and tensor.name == "parallel=tensor tp=2", report
    assert 0 == max(d for d, _ in one.differences.values()) < tensor.differences["gradients"][0]
    assert tensor.ratios["gradients"] < 1 < tensor.differences["gradients"][0] / 1e-5


@pytest.mark.slow
def test_a_model_whose_first_gradients_overflow_in_fp16_is_verified(tmp_path):
    loud = layer("Loud", lambda self, x: x / 1000 * 1000)
    words = (*DDP, "train.precision=fp16", "device=cpu", "logger=none", f"hydra.run.dir={tmp_path}/v")
    report = verify(*words, model=chain(loud), data=DATA)
    assert report.ok and [layout.name for layout in report.compared] == ["parallel=ddp dp=2"], report


def only(tmp_path, model, *words):
    report = verify(*WORDS, "verify.steps=2", *words, f"hydra.run.dir={tmp_path}/v", model=model, data=DATA)
    assert not report.ok
    return report, next(layout for layout in report.layouts if layout.holds is False)


WRONG_IN_A_LAYOUT = {broken.name: broken for broken in ZOO if broken.wrong}
QUICK = ("numpy noise",)  # wrong with several ranks


@pytest.mark.parametrize("name", with_slow(WRONG_IN_A_LAYOUT, WRONG_IN_A_LAYOUT.keys() - QUICK))
def test_a_broken_model_is_wrong_in_a_layout_and_the_probe_explains_it(name, tmp_path):
    broken = WRONG_IN_A_LAYOUT[name]
    _, failed = only(tmp_path, broken.chain(), *broken.wrong)
    if broken.wrong in (SMALLER, WHOLE):
        assert failed.reason == "micro-batches of another size change what is learned"
    else:
        explained = bool(broken.probe) or name == "initial numbers"  # by the question about two equal runs
        assert failed.reason.startswith("first in ") and ("Probe: " in failed.reason) == explained, failed.reason
    if name == "numpy noise":
        assert "first in the forward of b on rank" in failed.reason and "its inputs are equal" in failed.reason
        assert "Probe: draws from numpy's generator in training" in failed.reason


def doubled(agree, self, *args):
    for stage in self.stages:
        for parameter in stage.layers.parameters() if stage.ends_chain else ():
            parameter.grad *= 2
    return agree(self, *args)


def shifted(placed, self, batch):
    if self.mesh.replica == 1:
        batch = batch.map(lambda tensor: torch.cat([tensor[:1], tensor[:-1]]))
    return placed(self, batch)


def lost(forward_backward, self, batch):
    chunks = zip(self.samples_of(batch).tolist(), batch.chunks(self.plan.chunks), strict=True)
    for samples, chunk in [*chunks][1:]:
        self._model(*chunk.input_tensors, samples=samples, targets=chunk.targets, weights=chunk.weights).backward()


def stale(step, self, closure=None):
    parameters = [p for group in self.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in parameters]
    step(self, closure)
    for parameter, old in zip(parameters, kept, strict=True) if os.environ["RANK"] == "1" else ():
        parameter.data.copy_(old)


def not_summed(*_):
    return []


WRONG = {
    "gradients doubled": (Strategy._agree, doubled, chain, DDP, "first in the gradient of a."),
    "of a stage": (Strategy._agree, doubled, chain, PIPE, "first in the gradient of c.linear"),
    "a batch shifted": (Strategy._placed, shifted, chain, DDP, "first in the forward of a on rank 1, micro-batch 2"),
    "a micro-batch lost": (
        LocalStrategy.forward_backward, lost, chain, DDP, "micro-batch 0 (samples 0 to 1) was not computed",
    ),
    "stale weights": (torch.optim.SGD.step, stale, chain, PIPE, "of step 2 on rank 1"),
    "a tied gradient": (_copies, not_summed, tied, PIPE, "first in the gradient of a.weight (tied: d.weight)"),
}  # fmt: skip


@pytest.mark.parametrize("name", with_slow(WRONG, WRONG.keys() - {"a batch shifted"}))
def test_a_broken_strategy_is_found_and_the_first_difference_named(name, tmp_path):
    right, wrong, model, layout, says = WRONG[name]
    _, failed = only(tmp_path, elsewhere(right, wrong, model), *layout)
    assert says in failed.reason, failed.reason


def test_the_command_ends_with_code_1_where_a_probe_finds_something(tmp_path, capsys):
    words = ["mode=verify", "model=toy", "parallel=ddp", "parallel.dp=2", "verify.steps=1", "verify.tolerance=0"]
    assert main([*words, "logger=none", f"hydra.run.dir={tmp_path}/run"]) == 1
    assert "is not the same in every layout" in capsys.readouterr().err


def waiting(forward, self, x):
    if os.environ["RANK"] == "1" and self.training and torch.is_grad_enabled():
        time.sleep(100)
    return forward(self, x)


@pytest.mark.slow
def test_a_layout_whose_ranks_wait_for_each_other_is_ended_and_named(tmp_path):
    _, failed = only(tmp_path, elsewhere(torch.nn.Tanh.forward, waiting), *DDP, "verify.timeout_s=4")
    assert "rank 1 has not moved before step 1" in failed.reason and "in forward" in failed.reason, failed.reason
