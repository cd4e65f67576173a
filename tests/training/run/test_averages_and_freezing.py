"""Averaged weights, modules that are unfrozen later, and rates that follow evaluations, beside loops in plain torch."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from composed import records, run_layout, saved, steps
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from data.tensors import TensorData
from training import train

STEPS, HALF, ROWS, RATE = 12, 7, 40, 0.2
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)).double()
Y = X[:, :2].sin()
WORDS = [
    "parallel.threads=1", "logger=none", "train.precision=fp64", "train.epochs=null", f"train.global_batch_size={ROWS}",
    "train.eval_every=2", f"optim.lr={RATE}",
]  # fmt: skip
EQUAL = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Two layers with BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.norm, self.head = nn.Linear(6, 8).double(), nn.BatchNorm1d(8).double(), nn.Linear(8, 2).double()

    def forward(self, x):
        return self.head(self.norm(self.body(x)).tanh())


def go(folder, *words):
    """A training on the same rows in every step, which are also those of the evaluation and of the test."""
    data = TensorData(X, Y, valid=(X, Y), test=(X, Y))
    return train(*WORDS, *words, f"hydra.run.dir={folder}", model=Net(), loss=nn.MSELoss(), data=data)


def resumed(folder, *words):
    """A run as in ``go``, which ends with the same bits if it is resumed in the middle."""
    words = [*words, f"train.steps={STEPS}", f"train.checkpoint_every={HALF}", "train.keep_checkpoints=99"]
    whole = go(folder / "whole", *words)
    rest = go(folder / "rest", *words, f"train.resume='{folder}/whole/checkpoints/step-{HALF:08d}'")
    for which in ("last", "best"):
        ours = rest.state_dict(which)
        assert all(torch.equal(ours[name], tensor) for name, tensor in whole.state_dict(which).items())
    return whole


def in_plain_torch(optimizer, net, before=lambda step: None, after=lambda step: None, clip=None):
    """The results of evaluations of ``net``, or of the module that ``after(step)`` returns."""
    found = []
    for step in range(1, STEPS + 1):
        before(step)
        net.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), Y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        shown = after(step) or net
        if step % 2 == 0:
            shown.eval()
            found.append(nn.functional.mse_loss(shown(X), Y).item())
    return found


def of_evaluations(result):
    return [record["val_loss"] for record in result.metrics if "val_loss" in record]


class Case(NamedTuple):
    name: str
    decay: float | None = None
    every: int = 1
    start: int = 1
    use_buffers: bool = True


AVERAGES = [
    pytest.param(Case("ema", decay=0.7, every=3, start=4), id="ema of some steps"),
    pytest.param(Case("ema", decay=0.8), id="ema", marks=pytest.mark.slow),
    pytest.param(Case("ema", decay=0.8, every=2, use_buffers=False), id="ema of parameters", marks=pytest.mark.slow),
    pytest.param(Case("swa", start=6, every=2), id="swa", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", AVERAGES)
def test_averaged_weights_are_those_of_torch_in_evaluations_files_and_after_resuming(tmp_path, case):
    keys = [f"callbacks.{case.name}.{key}={value}" for key, value in case._asdict().items() if key != "name"]
    keys = [key for key in keys if not key.endswith("None")]
    result = resumed(tmp_path, f"callbacks=[{case.name}]", *keys, "optim=sgd", "scheduler=constant")
    net = Net()
    rule = None if case.decay is None else get_ema_multi_avg_fn(case.decay)
    average = AveragedModel(net, multi_avg_fn=rule, use_buffers=case.use_buffers)

    def after(step):
        if step >= case.start and step % case.every == 0:
            average.update_parameters(net)
        return average.module if average.n_averaged else None

    wanted = in_plain_torch(torch.optim.SGD(net.parameters(), lr=RATE), net, after=after)
    assert of_evaluations(result) == pytest.approx(wanted, rel=1e-12)
    assert result.summary["test_loss"] == pytest.approx(wanted[-1], rel=1e-12)
    found = result.state_dict()
    for name, tensor in average.module.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), **EQUAL)
        assert not torch.equal(found[name], net.get_parameter(name))
    torch.testing.assert_close(found["norm.running_var"], average.module.norm.running_var, **EQUAL)


@pytest.mark.slow
def test_an_average_that_is_left_out_or_new_is_told_and_training_continues_from_the_trained_weights(tmp_path, capfd):
    words = ["optim=sgd", "scheduler=constant"]
    plain = go(tmp_path / "plain", *words, f"train.steps={STEPS}").state_dict()
    go(tmp_path / "ema", *words, f"train.steps={HALF}", "callbacks=[ema]")
    words += [f"train.steps={STEPS}", f"train.resume='{tmp_path}/ema'"]
    new = ["callbacks=[swa]", "callbacks.swa.start=99"], "swa begins a new average: the checkpoint has ema"
    for more, says in (([], "callbacks=[ema] would continue it"), new):
        result = go(tmp_path / f"without {len(more)}", *words, *more)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in result.state_dict().items())
        said = "".join(capfd.readouterr())
        assert says in said and ("the first weights that swa averages come later" in said) == bool(more)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("optim", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_frozen_modules_are_trained_after_their_step_as_by_requires_grad(tmp_path, optim):
    words = [f"optim={optim}", "optim.weight_decay=0.1", "optim.decay_vectors=true", "scheduler=constant"]
    words += ["train.unfreeze={5: [body], 8: [norm]}", "train.grad_clip=0.3", "optim.lr=0.01"]
    (kind, more), net = OPTIMIZERS[optim], Net()
    words += [f"optim.{key}={[*value] if isinstance(value, tuple) else value}" for key, value in more.items()]
    result = resumed(tmp_path, *words)
    optimizer = kind(net.parameters(), lr=0.01, weight_decay=0.1, **more)

    def before(step):
        net.body.requires_grad_(step > 5)
        net.norm.requires_grad_(step > 8)

    wanted = in_plain_torch(optimizer, net, before=before, clip=0.3)
    assert of_evaluations(result) == pytest.approx(wanted, rel=1e-10)
    norms = [record["grad_norm"] for record in result.metrics if "grad_norm" in record]
    assert len(norms) == STEPS and norms[5] > norms[4], "the norm is that of the trained parameters"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"threshold_mode": "abs", "threshold": 0.06, "cooldown": 1, "min_lr": 0.04},
    ],
)
def test_the_rate_falls_at_a_plateau_as_by_torch(tmp_path, more):
    keys = {"factor": 0.3, "patience": 0, "threshold": 0.3, **more}
    typed = [f"scheduler.{key}={value}" for key, value in keys.items()]
    result = resumed(tmp_path, "scheduler=plateau", *typed, "optim=sgd")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    schedule, rates = ReduceLROnPlateau(optimizer, **keys), []

    def before(step):
        if step % 2 == 1 and step > 1:
            with torch.no_grad():
                schedule.step(nn.functional.mse_loss(net.eval()(X), Y))
        rates.append(optimizer.param_groups[0]["lr"])

    wanted = in_plain_torch(optimizer, net, before=before)
    assert [record["lr"] for record in result.metrics if "lr" in record] == pytest.approx(rates, rel=1e-12)
    assert len(set(rates)) > 2 and of_evaluations(result) == pytest.approx(wanted, rel=1e-12)


ALL = [
    "train.epochs=null", "train.eval_batches=2", "train.global_batch_size=8", "train.precision=fp64", "optim.lr=1e-2",
    "train.eval_every=1", "train.grad_clip=0.5", "scheduler=plateau", "scheduler.patience=0", "scheduler.factor=0.5",
    "scheduler.threshold=0.02",
]  # fmt: skip
GPT2 = [
    "model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.dropout=0.1",
    "model.vocab_size=384", "data.vocabulary=words", "data.seq_len=16", "optim=adamw",
    "train.unfreeze={3: [wpe, h.1], 4: [head]}",  # the head is tied to the embedding
]  # fmt: skip
CONVNET = ["model=convnet", "optim=sgd", "train.unfreeze={3: [layer1]}"]  # with running statistics
EMA = {"ema": {"_target_": "training.callbacks.averaging.EMA", "decay": 0.6, "start": 2}}


@pytest.fixture(scope="module")
def start(ranks, text, tmp_path_factory):
    """``start("gpt2", layout, steps, *words)``: the folder of a run with all three."""
    models = {"gpt2": [*text, *GPT2], "convnet": CONVNET}

    @cache
    def begin(model, layout, last, *words):
        folder = tmp_path_factory.mktemp(f"{model}-{layout}".replace(" ", "-"))
        words = [*models[model], *ALL, f"train.steps={last}", *words]
        return run_layout(ranks, layout, folder, *words, callbacks=EMA)

    return begin


LAYOUTS = ["ddp", "pipelined", "pipe_fsdp", "fsdp", "tensor", "pipe_ddp", "hsdp", "pipelined tp", "fsdp tp"]
RING = zip(["gpt2"] * len(LAYOUTS), LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True)
QUICK, *OTHERS = ("convnet", "ddp", "pipelined"), ("convnet", "pipe_fsdp", "single"), ("gpt2", "pipelined", "fsdp")


@pytest.mark.parametrize(
    "model, before, after",
    [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in [*RING, *OTHERS])],
)
def test_every_layout_averages_unfreezes_and_follows_a_plateau_alike_also_resumed(start, model, before, after):
    single, first = start(model, "single", 6), start(model, before, 3)
    rest = start(model, after, 6, f"train.resume='{first}'")
    lines = [[*records(single)], [*records(first), *records(rest)]]
    keys = ("val_loss", "lr", "grad_norm")
    wanted, found = ({(line["step"], k): line[k] for line in of for k in keys if k in line} for of in lines)
    assert found == pytest.approx(wanted, rel=1e-11) and len({line["lr"] for line in steps(single)}) > 1
    for kind in ("model", "optimizer"):
        ours, theirs = saved(rest, 6, kind), saved(single, 6, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, **EQUAL, msg=name)
    late = ("embedding.wpe", "h.1", "layer1")
    states = [name for name in saved(first, 3, "optimizer") if name.startswith(late)]
    assert any("running_mean/trained" in name for name in states) == (model == "convnet")
    assert states and all(name.endswith("/trained") for name in states), "frozen, and averaged all the same"
