"""Several targets, a coefficient that follows the step, weight decay by names: in every layout as in a plain loop."""

import math
from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from data.loader import TrainBatches
from data.tensors import TensorData
from models.cut import Columns, Rows
from models.losses import IGNORED, Several, Sums
from models.sequential import chain_of
from models.step import current_step
from training import train

STEPS, HALF, BATCH, SEED, WARMUP = 10, 5, 16, 7, 8
OF_CLASSES = torch.tensor([1.0, 2.0, 0.5])
WEIGHTS = {"kind": 1.0, "size": 0.3, "latent": 0.7}
DECAYS = {"block": 0.3, "down": 0.0, "heads.kind": 0.2, "mean.bias": 0.4}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x):
        return x + self.down(self.up(x).tanh()) / math.sqrt(current_step())


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.size, self.mean, self.spread = (nn.Linear(24, n) for n in (3, 2, 4, 4))

    def forward(self, x):
        return self.kind(x), self.size(x), torch.cat((self.mean(x), self.spread(x)), dim=1)


def kl_of(latent):
    mean, log_variance = latent.chunk(2, dim=1)
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2


class Annealed:
    """The KL divergence from a normal distribution, which counts more from step to step."""

    metrics = ("kl",)

    def count(self, targets):
        return len(targets)

    def __call__(self, output, targets, weights):
        kl = kl_of(output)
        return Sums(kl * min(1.0, current_step() / WARMUP), torch.tensor(len(output)), (kl,))


def net_and_data():
    torch.manual_seed(1)
    x = torch.randn(110, 16, dtype=torch.float64)
    kinds, sizes = x[:, :3].argmax(dim=1), x[:, 3:5].sin()
    kinds[torch.rand(110) < 0.4] = IGNORED  # unequally many in the parts of a batch
    data = TensorData(x, (kinds, sizes, kinds), valid=0.13, test=0.12)
    first = nn.Linear(16, 24)
    net = nn.Sequential(OrderedDict(first=first, block=Block(), norm=nn.LayerNorm(24), heads=Heads())).double()
    return net, data


def plain_losses(outputs, targets, step):
    """The means, each over its own targets."""
    (kind, size, latent), (kinds, sizes, _) = outputs, targets
    of_kind = F.cross_entropy(kind, kinds, OF_CLASSES.double(), label_smoothing=0.1)
    latent = kl_of(latent) / len(kinds)
    return {"kind": of_kind, "size": F.mse_loss(size, sizes), "latent": min(1.0, step / WARMUP) * latent, "kl": latent}


def total(losses):
    return sum(weight * losses[name] for name, weight in WEIGHTS.items())


def in_a_loop(monkeypatch):
    """The loss of each step, those of both evaluations, and the weights."""
    net, data = net_and_data()
    batches, found, evaluated, now = TrainBatches(data.train, BATCH, SEED), [], {}, 1
    monkeypatch.setitem(Block.forward.__globals__, "current_step", lambda: now)
    named = dict(net.named_parameters())
    decay = {name: 0.1 * (p.dim() > 1) for name, p in named.items()}
    decay |= {"block.up.weight": 0.3, "block.down.weight": 0.0, "heads.kind.weight": 0.2, "heads.mean.bias": 0.4}
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": decay[n]} for n, p in named.items()], lr=0.02)
    for now in range(1, STEPS + 1):
        batch = batches[now]
        losses = plain_losses(net(batch.inputs), batch.targets, now)
        optimizer.zero_grad()
        total(losses).backward()
        optimizer.step()
        found.append({"loss": total(losses).item(), **{name: loss.item() for name, loss in losses.items()}})
        if now in (HALF, STEPS):
            with torch.no_grad():
                evaluated[now] = total(plain_losses(net(data.valid.inputs), data.valid.targets, now)).item()
    with torch.no_grad():
        test = total(plain_losses(net(data.test.inputs), data.test.targets, now)).item()
    monkeypatch.undo()
    return found, evaluated, test, net.state_dict()


LAYOUTS = {
    "single": ["parallel=single"],
    "chunks": ["parallel=single", "parallel.chunks=4", "train.activation_checkpointing=true"],
    "ddp": ["parallel=ddp", "parallel.dp=2"],
    "pipelined": ["parallel=pipelined", "parallel.chunks=4"],
    "pipe_fsdp": ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.chunks=2", "parallel.schedule=1f1b"],
    "fsdp": ["parallel=fsdp", "parallel.dp=2", "parallel.chunks=2"],
    "tensor": ["parallel=tensor"],
    "model_parallel": ["parallel=model_parallel", "parallel.chunks=2", "parallel.devices=[cpu,cpu]"],
}
PAIRS = [
    ("single", "chunks"), ("ddp", "single"), ("pipelined", "ddp"), ("pipe_fsdp", "pipelined"), ("tensor", "pipe_fsdp"),
    ("fsdp", "tensor"), ("model_parallel", "fsdp"),
]  # fmt: skip
MARKED = [pytest.param(*pair, marks=[pytest.mark.slow] * (pair != PAIRS[0])) for pair in PAIRS]


@pytest.mark.parametrize("first, second", MARKED)
def test_losses_evaluations_and_weights_are_those_of_a_plain_loop(tmp_path, monkeypatch, first, second):
    """The second half of the run resumes the first one, in another layout."""
    wanted, evaluated, test, weights = in_a_loop(monkeypatch)
    net, data = net_and_data()
    losses = {"kind": nn.CrossEntropyLoss(OF_CLASSES, label_smoothing=0.1), "size": nn.MSELoss(), "latent": Annealed()}
    cut = {"block.up": Columns(), "block.down": Rows()}
    model = chain_of(net, Several(losses, WEIGHTS), cut=cut)
    words = [
        "optim=adamw", "optim.lr=0.02", "optim.betas=[0.9,0.999]", f"optim.decays={DECAYS}".replace("'", ""),
        "scheduler=constant", "train.precision=fp64", f"train.global_batch_size={BATCH}", "train.epochs=null",
        f"train.eval_every={HALF}", "train.grad_clip=null", "logger=none", "device=cpu", "parallel.threads=1",
        f"seed={SEED}",
    ]  # fmt: skip
    seen = []
    for layout, end in ((first, HALF), (second, STEPS)):
        more = [f"train.resume='{tmp_path}/{HALF}'"] * bool(seen)
        folder = f"hydra.run.dir={tmp_path}/{end}"
        result = train(*words, *LAYOUTS[layout], *more, f"train.steps={end}", folder, model=deepcopy(model), data=data)
        seen += result.metrics
    steps = [line for line in seen if "loss" in line]
    names = {"loss": "loss", "kind": "kind_loss", "size": "size_loss", "latent": "latent_loss", "kl": "latent_kl"}
    for name, metric in names.items():
        assert [line[metric] for line in steps] == pytest.approx([each[name] for each in wanted], rel=1e-10), metric
    assert {line["step"]: line["val_loss"] for line in seen if "val_loss" in line} == pytest.approx(evaluated, 1e-10)
    assert result.summary["test_loss"] == pytest.approx(test, rel=1e-10)
    for name, tensor in result.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-9, atol=1e-10, msg=name)
    again = train(f"checkpoint='{tmp_path}/{HALF}'", "mode=eval", *LAYOUTS[first][:1], "logger=none",
                  f"hydra.run.dir={tmp_path}/eval", model=deepcopy(model), data=data)  # fmt: skip
    assert again.metrics[0]["val_loss"] == pytest.approx(evaluated[HALF], rel=1e-10)
