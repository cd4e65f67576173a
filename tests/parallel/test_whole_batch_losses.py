"""Losses that compare samples, ignore weights or draw: each number is that of a plain loop, in every layout."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Layout, planned
from torch import Tensor, nn

from data.dataset import Batch
from models.chain import Chain, LayerSpec
from models.losses import ClassCrossEntropy, Sums, gather
from parallel.examination import examine
from parallel.stage import Stage
from parallel.strategy import Options, build_strategy

GENERATOR = torch.Generator().manual_seed(3)
PAIRS = tuple(torch.randn(16, 6, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
COUNTED = 5  # of the 16 samples of a last batch: one replica of four has a part of its samples, two have none
STEPS, ONE = 2, Layout("single")


class Left(nn.Linear):
    def forward(self, x, y):
        return super().forward(x), y


class Right(nn.Linear):
    def forward(self, x, y):
        return F.normalize(x, dim=1), F.normalize(super().forward(y), dim=1)


class TimeFirst(nn.Linear):
    """[b, 6] -> ([2, b, 3], a number), as a recurrent layer gives it with an auxiliary loss."""

    def forward(self, x, y):
        return super().forward(x).unflatten(1, (2, 3)).transpose(0, 1), torch.zeros(2)


class ReadsNumbers(Left):
    def forward(self, x, y):
        return super().forward(x * float(x.abs().max() > 0), y)


class Noise(nn.Module):
    def forward(self, x, y):
        return x + torch.randn_like(x), y


def compared(x: Tensor, y: Tensor) -> Tensor:
    logits = 4 * x @ y.T
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum")


class Whole:
    """The value of the whole batch, on each replica."""

    metrics = ("accuracy",)

    def __call__(self, output, targets, weights):
        x, y = gather(output)
        right = (x @ y.T).argmax(1) == torch.arange(len(x))
        return Sums(compared(x, y), torch.tensor(len(x)), (right.sum(),))


class Own:
    """The samples of a replica beside those of all."""

    metrics = ("accuracy",)

    def __call__(self, output, targets, weights):
        x, y = output
        logits, pairs = 4 * x @ gather(y).T, 4 * (x * y).sum(1)
        right = logits.amax(1) < pairs + 1e-9
        return Sums((logits.logsumexp(1) - pairs).sum(), torch.tensor(len(x)), (right.sum(),))


class Ignores:
    """Looks at no weights: the mean difference of each sample."""

    metrics = ("near",)

    def __call__(self, output, targets, weights):
        x, y = output[:2] if output[0].dim() == 2 else (output[0].transpose(0, 1).flatten(1), targets)
        near = ((x - y).abs().amax(1) < 2).sum()
        return Sums((x - y).square().mean(1).sum() + sum(output[2:]) * len(x), torch.tensor(float(len(x))), (near,))


class Head(Right):
    """A last layer that computes the loss."""

    def loss(self, x, y, targets, weights):
        return Ignores()(self(x, y), targets, weights)


def chain(first=Left, last=Right, loss=None) -> Chain:
    layers = [LayerSpec("first", first)] if first is Noise else [LayerSpec("first", partial(first, 6, 6))]
    layers += [LayerSpec("last", partial(last, 6, 6))] if last else []
    return Chain(layers, loss or Ignores())


def strategy_of(chain: Chain, layout: Layout):
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = planned(layout, chain, 16, precision="fp64", where={"world_size": world})
    mesh = plan.mesh(dist.get_rank() if world > 1 else 0).connect(60)
    batch = Batch(PAIRS, PAIRS[1]).chunks(plan.dp)[mesh.replica]
    sample, options = batch.chunks(plan.chunks)[0], Options(seed=7, timeout_s=60)
    plan = replace(plan, **examine(chain, sample).for_plan())
    return build_strategy(plan, chain, mesh, options, sample, 0), batch


def evaluation(strategy, batch: Batch, number: int = 1) -> list[float]:
    weights = (torch.arange(16) < COUNTED).float().chunk(strategy.mesh.dp)[strategy.mesh.replica]
    return strategy.all_sum(strategy.eval_step(Batch(batch.inputs, batch.targets, weights=weights), number))


def trained(layout: Layout, loss) -> tuple[list[float], list[float]]:
    """The losses of some steps, and the sums of an evaluation of some samples."""
    strategy, batch = strategy_of(chain(loss=loss), layout)
    losses = []
    optimizer = torch.optim.SGD(strategy.parameters(), 0.5)
    for step in range(1, STEPS + 1):
        losses.append(strategy.train_step(batch, step).loss)
        optimizer.step()
    return losses, evaluation(strategy, batch)


def in_a_loop() -> tuple[list[float], list[float]]:
    layers = chain().build(["first", "last"], 7, torch.device("cpu"), torch.float64)
    losses, optimizer = [], torch.optim.SGD(layers.parameters(), 0.5)
    for _ in range(STEPS):
        loss = compared(*layers(*PAIRS)) / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    x, y = layers(*(side[:COUNTED] for side in PAIRS))
    right = ((x @ y.T).argmax(1) == torch.arange(COUNTED)).sum().item()
    return losses, [compared(x, y).item() / COUNTED, right / COUNTED]


@pytest.mark.parametrize("loss", [Whole(), Own()], ids=["whole", "own"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("single"),
        Layout("ddp", dp=4),
        Layout("fsdp", dp=2),
        Layout("hsdp", dp=4, shard=2),
        Layout("pipe_ddp", dp=2, pp=2),
    ],
    ids=str,
)
def test_a_contrastive_loss_of_gathered_features_is_that_of_the_whole_batch(ranks, layout, loss):
    wanted, (mean, metric) = in_a_loop()
    for losses, (total, count, hits) in ranks.run(layout.processes, trained, layout, loss):
        assert losses == pytest.approx(wanted, rel=1e-12)
        assert (total / count, hits / count) == pytest.approx((mean, metric), rel=1e-12)


IGNORING = {
    "a loss": chain,
    "a last layer with a loss": partial(chain, last=Head),
    "time first": partial(chain, TimeFirst, None),
    "a layer that reads numbers": partial(chain, ReadsNumbers),
}
NOT_IN_STAGES = "time first", "a layer that reads numbers"


def evaluated(layout: Layout, model) -> list[float]:
    strategy, batch = strategy_of(IGNORING[model](), layout)
    return evaluation(strategy, batch)


@pytest.mark.parametrize("model", IGNORING)
@pytest.mark.parametrize("layout", [ONE, Layout("single", chunks=4), Layout("pipelined", pp=2, chunks=2)], ids=str)
def test_samples_that_fill_up_a_batch_reach_no_loss_of_the_user(ranks, layout, model):
    if layout.pp > 1 and model in NOT_IN_STAGES:
        pytest.skip("does not run")
    made = IGNORING[model]()
    layers = made.build(made.names, 7, torch.device("cpu"), torch.float64)
    output = layers(*(side[:COUNTED] for side in PAIRS))
    wanted = Ignores()(output, PAIRS[1][:COUNTED], None).stack().tolist()
    for sums in ranks.run(layout.processes, evaluated, layout, model):
        assert sums == pytest.approx(wanted, rel=1e-12)


class NoisyLoss(Ignores):
    def __call__(self, output, targets, weights):
        return super().__call__((output[0] + torch.randn_like(output[0]), output[1]), targets, weights)


def drawn(layout: Layout) -> list[list[float]]:
    """Evaluations of a layer and a loss that draw: twice the first batch, then the second."""
    strategy, batch = strategy_of(chain(Noise, loss=NoisyLoss()), layout)
    found = []
    for number in (1, 1, 2):
        torch.manual_seed(number + len(found))  # what others draw does not matter
        before = torch.get_rng_state()
        found.append(evaluation(strategy, batch, number))
        assert torch.equal(torch.get_rng_state(), before)
    return found


def test_noise_of_an_evaluation_is_the_same_in_each_evaluation_and_layout_and_another_in_each_batch(ranks):
    (wanted,) = ranks.run(1, drawn, Layout("single", chunks=2))
    assert wanted[0] == wanted[1] != wanted[2]
    for layout in (Layout("ddp", dp=2), Layout("pipelined", pp=2, chunks=2)):
        for found in ranks.run(2, drawn, layout):
            assert [*found[0], *found[2]] == pytest.approx([*wanted[0], *wanted[2]], rel=1e-12) and found[0] == found[1]


def test_a_loss_of_this_project_gets_all_samples_with_their_weights(monkeypatch):
    """With fewer samples, the bits of its evaluations would change."""
    strategy, _ = strategy_of(Chain([LayerSpec("only", partial(nn.Linear, 6, 6))], ClassCrossEntropy()), ONE)
    seen = []
    hook = lambda stage, name, where, layer, *given: seen.append(given) or layer(*given)  # noqa: E731
    monkeypatch.setattr(Stage, "layer_hook", hook)
    strategy.eval_step(Batch(PAIRS[0], torch.arange(16) % 6, weights=(torch.arange(16) < COUNTED).double()))
    output, targets, weights = seen[-1]
    assert len(output) == len(targets) == 16 and weights.sum() == COUNTED
