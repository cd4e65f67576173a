"""What the tests of this folder run in a process with pretend GPUs."""

import time
from unittest import mock

import pretend_cuda
import torch
import torch.nn.functional as F
from cases import Layout, Recipe, build, chain_and_batches
from torch import Tensor, nn

from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from parallel.axes import replicas
from parallel.devices import peak_memory_bytes
from parallel.host_group import HostGroup
from parallel.shape_inference import trace
from parallel.stage import Stage
from training.optimizer import Optimizer

ADAMW = {
    "_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.1, "decay_vectors": False, "others": None,
    "rates": None,
}  # fmt: skip


def borders(recipe: Recipe, device_type: str) -> list:
    chain, batch_at = chain_and_batches(recipe)
    traced = trace(chain, batch_at(1), recipe.precision, device_type)
    return [[(x.shape, x.dtype, x.requires_grad) for x in layer.outputs] for layer in traced]


def waits_of_an_update_after_a_resume(recipe: Recipe) -> tuple[dict, dict]:
    """What makes the host wait in AdamW's second update, without and with a resume before it; two GPUs, two stages."""
    counted = []
    for resumes in (False, True):
        plan, strategy = build(Layout("model_parallel", pp=2, chunks=4), recipe)
        assert [str(stage.device) for stage in strategy.stages] == ["cuda:0", "cuda:1"]
        _, batch_at = chain_and_batches(recipe)
        optimizer = Optimizer(ADAMW, strategy)
        for step in (1, 2):
            strategy.train_step(batch_at(step), step)
            if resumes:
                for parameter in strategy.parameters():
                    state = {key: piece.tensor.cpu() for key, piece in optimizer.state_of(parameter).items()}
                    optimizer.load_state_of(parameter, state)
            with pretend_cuda.counted_waits() as waits:
                optimizer.step(1e-3)
        counted.append(dict(waits))
    return tuple(counted)


def generators_seeded(recipe: Recipe) -> list[int]:
    """How often each GPU's generator is seeded in a step of data_parallel with dropout."""
    plan, strategy = build(Layout("data_parallel", chunks=2), recipe)
    _, batch_at = chain_and_batches(recipe)
    before = [generator.seeded for generator in torch.cuda.default_generators]
    strategy.train_step(batch_at(1), 1)
    return [g.seeded - b for g, b in zip(torch.cuda.default_generators, before, strict=True)]


class LayerDrop(nn.Linear):
    """Left out in a quarter of all forwards, by a number of the host; in others it adds noise of its device."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.25:
            return x
        return x + F.dropout(super().forward(x).relu(), 0.1, self.training)


def gradients_of_layer_drop(recompute: bool) -> list[Tensor]:
    """The gradients of six layers, on GPU 0, where other numbers were drawn before."""
    torch.rand(int(time.perf_counter_ns() % 100))
    chain = Chain([LayerSpec(f"h.{i}", lambda: LayerDrop(8, 8)) for i in range(6)], loss=SquaredError())
    stage = Stage(chain, chain.names, seed=5, device=torch.device("cuda:0"), recompute=recompute)
    x = torch.linspace(-1, 1, 32).view(4, 8).to("cuda:0")
    for index in range(4):
        stage.begin(training=True, step=1)
        stage(x, samples=(4 * index, 4), targets=x).backward()
        stage.end()
    return [parameter.grad.cpu() for parameter in stage.parameters()]


def streams_of_a_hierarchy(recipe: Recipe) -> list[tuple[bool, bool]]:
    """Of each collective of the hook: was it on the default stream, and had its own stream waited for that one?"""
    import torch.distributed as dist

    plan, strategy = build(Layout("ddp", dp=2, chunks=2, comm_hook="hierarchical"), recipe)
    _, batch_at = chain_and_batches(recipe)
    seen = []

    def noted(collective):
        def call(*args, **kwargs):
            stream = torch.cuda.current_stream()
            seen.append((stream is torch.cuda.default_stream(), torch.cuda.default_stream() in stream.waited_for))
            return collective(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_gather_into_tensor", noted(dist.all_gather_into_tensor)),
        mock.patch.object(replicas, "reduce_scatter", noted(replicas.reduce_scatter)),
    ):
        strategy.train_step(batch_at(1).chunks(2)[strategy.mesh.replica], 1)
    return seen


def peaks(recipe: Recipe) -> tuple[int, int]:
    """The peak memory of a process with two GPUs, and the sum of what each has."""
    from training.reporting.summary import Outcome, gather_results

    plan, strategy = build(Layout("model_parallel", pp=2, chunks=4), recipe)
    (result,) = gather_results(strategy, Outcome())
    return result.peak_memory, sum(peak_memory_bytes(f"cuda:{i}") for i in range(2))


def exchange(rank_of_pool: None = None) -> list:
    """Operations of a group whose ranks share a GPU, each with tensors of the GPU."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    assert isinstance(dist.group.WORLD, HostGroup)
    mine = torch.full((3,), float(rank + 1), device="cuda")
    total = mine.clone()
    dist.all_reduce(total)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    whole = torch.empty(3 * size, device="cuda")
    dist.all_gather_into_tensor(whole, mine)
    part = torch.empty(3, device="cuda")
    dist.reduce_scatter_tensor(part, whole)
    sent = torch.full((3,), 7.0 if rank == 0 else 0.0, device="cuda")
    dist.broadcast(sent, src=0)
    received = torch.zeros(3, device="cuda")
    operations = [
        dist.P2POp(dist.isend, mine.view(1, 3).t()[:, 0], (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier()
    results = [total, *parts, whole, part, sent, received]
    assert all(t.is_cuda for t in results)
    return [t.tolist() for t in results]
