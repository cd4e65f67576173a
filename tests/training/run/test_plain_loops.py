"""Runs of one process beside a loop in plain torch: what one process does wrong, all layouts share."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from data.loader import TrainBatches
from data.tensors import TensorData
from training import train

STEPS, BATCH, SEED, IGNORED = 12, 16, 7, -100
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16_residual": torch.bfloat16}


class Case(NamedTuple):
    """What is trained how. ``resumed`` is the step after which the run is resumed; ``scale`` multiplies the samples."""

    optim: str
    options: dict
    precision: str = "fp64"
    chunks: int = 1
    clip: float | None = None
    gamma: float = 1.0
    recompute: bool = False
    resumed: int | None = None
    scale: float = 1.0
    loss: nn.Module = nn.CrossEntropyLoss()
    net: Callable[[], nn.Module] | None = None


class Reader(nn.Module):
    """Reads four numbers at a time, normalizes, and has a part that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.out = nn.GRU(4, 8, batch_first=True), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.BatchNorm1d(4)
        nn.init.constant_(self.unused.running_mean, 3.0)

    def forward(self, x):
        return self.out(self.norm(self.cell(x.unflatten(1, (4, 4)))[0][:, -1]).relu())


class Residual(nn.Linear):
    """Begins in place, as most residual blocks do."""

    def forward(self, x):
        return x + super().forward(nn.functional.relu(x, inplace=True))


def changed_in_place():
    return nn.Sequential(nn.Linear(16, 24), Residual(24, 24), Residual(24, 24), nn.Tanh(), nn.Linear(24, 3))


def partly_in_eval_mode():
    """A frozen BatchNorm, a dropout that is switched off, and weights with digits that float32 does not have."""
    net = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Dropout(), nn.Linear(24, 3)).double()
    for number in (*net.parameters(), net[1].running_mean, net[1].running_var):
        number.data.add_(torch.rand_like(number), alpha=1e-3)
    net[1].requires_grad_(False).eval()
    net[2].eval()
    return net


@torch.library.custom_op("plain_loops::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Has no kernel for tensors without memory."""
    return 2 * x


doubled.register_autograd(lambda context, gradient: 2 * gradient)
NO_META = {
    "a custom operator": doubled,
    "sparse": lambda x: (torch.eye(24, dtype=x.dtype).to_sparse() @ x.T).T,
    "torch.cond": lambda x: torch.cond(x.isfinite().all(), torch.sin, torch.cos, (x,)),
    "a tensor made on the CPU": lambda x: x * torch.arange(24.0) / 24,
    "jacrev": lambda x: x * torch.func.vmap(torch.func.jacrev(torch.sum))(x),
}


class NoMeta(nn.Linear):
    """Computes what torch cannot compute on the meta device, or under hooks."""

    def __init__(self, kind):
        super().__init__(24, 24)
        self.kind = kind

    def forward(self, x):
        return NO_META[self.kind](super().forward(x))


SGD = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]))
CASES = {
    "fp16 whose scale comes down": Case("SGD", SGD, "fp16", chunks=2, scale=400.0),
    "bf16 with recomputation": Case("SGD", SGD, "bf16", chunks=2, clip=0.3, recompute=True),
    "bf16 between layers": Case("SGD", SGD, "bf16_residual", chunks=2, gamma=0.5),
    "resumed within an epoch": Case("NAdam", {"lr": 0.01, "weight_decay": 0.1}, gamma=0.5, chunks=4, resumed=7),
    "accumulated and clipped": Case("AdamW", {"lr": 0.01, "weight_decay": 0.3}, chunks=8, clip=0.2, loss=SMOOTHED),
    "parts in eval mode, weights in double": Case("Adam", {"lr": 0.01}, chunks=2, resumed=7, net=partly_in_eval_mode),
    "changed in place": Case("SGD", SGD, chunks=2, recompute=True, net=changed_in_place),
    "a module's own forward": Case("Adam", {"lr": 0.01}, net=Reader),
    **{
        kind: Case("SGD", SGD, chunks=2, net=partial(nn.Sequential, nn.Linear(16, 24), NoMeta(kind), nn.Linear(24, 3)))
        for kind in NO_META
    },
}


def outputs(net: nn.Module, case: Case, x: torch.Tensor) -> torch.Tensor:
    """What the network computes in the case's precision, in float32 at least."""
    dtype, own = HALF.get(case.precision), next(net.parameters()).dtype
    x = x.to(own)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        for layer in net if isinstance(net, nn.Sequential) else [net]:
            x = layer(x.to(dtype) if case.precision == "bf16_residual" else x)
    return x.to(own)


def plain(net: nn.Module, case: Case, data: TensorData) -> list[float]:
    """Train ``net`` as a user of torch would, and return the loss of each step."""
    batches, found = TrainBatches(data.train, BATCH, SEED), []
    groups = [
        {"params": [p for p in net.parameters() if p.dim() >= 2]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, case.optim)(groups, **case.options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, batches.steps_per_epoch, case.gamma)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")
    loss, weights = deepcopy(case.loss).to(next(net.parameters()).dtype), case.loss.weight
    terms = nn.CrossEntropyLoss(loss.weight, label_smoothing=loss.label_smoothing, reduction="sum")
    for batch in map(batches.__getitem__, range(1, STEPS + 1)):
        optimizer.zero_grad()
        counted, total = batch.targets[batch.targets != IGNORED], 0.0
        count = len(counted) if weights is None else weights[counted].sum()
        for x, y in zip(batch.inputs.chunk(case.chunks), batch.targets.chunk(case.chunks), strict=True):
            value = terms(outputs(net, case, x), y) / count
            scaler.scale(value).backward()
            total += value.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), torch.inf if case.clip is None else case.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        found.append(total)
    return found


@pytest.fixture(autouse=True)
def one_thread():
    """As in the run: in half precision, the number of threads changes the rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the scaler skips the optimizer's first
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_weights_and_evaluation_are_those_of_a_plain_loop(case, tmp_path):
    torch.manual_seed(1)
    samples = torch.randn(110, 16, dtype=torch.float64)
    targets = samples[:, :3].argmax(dim=1)
    exact = case.precision == "fp64"
    if exact:  # in half precision, gradients that are divided by 13 and not by 16 are rounded to others
        targets[::5] = IGNORED
    data = TensorData(samples * case.scale, targets)
    deep = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 3))
    net = deep if case.net is None else case.net()
    words = [
        f"optim={case.optim.lower()}", *(f"optim.{key}={value}" for key, value in case.options.items()),
        "scheduler=step", f"scheduler.gamma={case.gamma}", f"train.precision={case.precision}",
        f"train.grad_clip={'null' if case.clip is None else case.clip}", f"parallel.chunks={case.chunks}",
        f"train.activation_checkpointing={case.recompute}", f"train.global_batch_size={BATCH}", "train.epochs=null",
        "logger=none", "device=cpu", "parallel.threads=1", f"seed={SEED}",
    ]  # fmt: skip
    words += ["optim.betas=[0.9,0.999]"] * (case.optim == "AdamW")
    steps = []
    for end in filter(None, (case.resumed, STEPS)):
        resume = [f"train.resume='{tmp_path}/{case.resumed}'"] if steps else []
        typed = [*words, *resume, f"train.steps={end}", f"hydra.run.dir={tmp_path}/{end}"]
        result = train(*typed, model=net, loss=case.loss, data=data)
        steps += [line for line in result.metrics if "loss" in line]
    expected = deepcopy(net).double() if exact else deepcopy(net)
    wanted = plain(expected, case, data)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert any(line["skipped"] for line in steps) == (case.precision == "fp16"), "else it shows nothing of the scale"
    near = 1e-9 if exact else 1e-4
    assert [line["loss"] for line in steps] == pytest.approx(wanted, rel=near)
    trained = result.state_dict()
    for name, tensor in expected.state_dict().items():
        if name != "unused.num_batches_tracked":  # the steps are counted
            torch.testing.assert_close(trained[name].to(tensor.dtype), tensor, rtol=near, atol=near, msg=name)
    with torch.no_grad():
        output = outputs(expected.eval(), case, data.test.inputs)
        loss = deepcopy(case.loss).to(output.dtype)(output, data.test.targets)
    assert result.summary["test_loss"] == pytest.approx(loss.item(), rel=10 * near)
