"""Small functions that tests run on every rank. Here and not in the tests, so that the ranks can import them."""

from collections import Counter

import torch
import torch.distributed as dist
from cases import Layout, Recipe, build
from small_models import chain_and_batches

from parallel.dtensor import local
from parallel.mesh import Mesh
from training.optimizer import Optimizer


def gathered_along(sizes: dict[str, int]) -> dict[str, list[str]]:
    """What this rank gathers along each axis of a mesh, where each rank gives its number in words."""
    mesh = Mesh(sizes, dist.get_rank()).connect(timeout_s=60)
    found = {name: mesh.gather(str(mesh.rank), mesh.axis(name).group) for name in sizes}
    mesh.disconnect()
    return found


def _one_step(recipe: Recipe, layout: Layout):
    plan, strategy = build(layout, recipe)
    batch = chain_and_batches(recipe)[1](1).chunks(plan.dp)[strategy.mesh.replica]
    return strategy, strategy.train_step(batch, 1)


def orders_of_a_planned_run(layout: Layout, recipe: Recipe) -> list[dict[int, list[str]]]:
    """What all ranks do in each of six steps, as this one knows it."""
    plan, strategy = build(layout, recipe)
    batch_at, seen = chain_and_batches(recipe)[1], []
    for step in range(1, 7):
        schedule = _schedule(strategy, batch_at(step))
        seen.append({rank: list(map(str, actions)) for rank, actions in schedule.pipeline_order.items()})
        strategy.train_step(batch_at(step), step)
    return seen


def gradients_of_a_planned_step(layout: Layout, recipe: Recipe, seconds: list) -> dict[str, torch.Tensor]:
    """This rank's, of one step in the order that is best for these times of each stage."""
    _, strategy = build(layout, recipe)
    batch = chain_and_batches(recipe)[1](1)
    _schedule(strategy, batch).plan(seconds)
    strategy.train_step(batch, 1)
    return {name: parameter.grad for name, parameter in strategy.named_parameters()}


def operators_of_a_planned_step(layout: Layout, recipe: Recipe, seconds: list) -> Counter[str]:
    """How often this rank calls each operator in one step in the order that is best for these times of each stage."""
    _, strategy = build(layout, recipe)
    batch = chain_and_batches(recipe)[1](1)
    _schedule(strategy, batch).plan(seconds)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        strategy.train_step(batch, 1)
    return Counter({event.key: event.count for event in profile.key_averages()})


def _schedule(strategy, batch):
    return strategy.prepared(batch.chunks(strategy.plan.chunks)[0])


def in_bf16(recipe: Recipe, layout: Layout) -> dict[str, bool]:
    """Whether this rank's gradients of a step have no more digits than bf16 has."""
    strategy, _ = _one_step(recipe, layout)
    return {name: bool((p.grad == p.grad.bfloat16()).all()) for name, p in strategy.named_parameters()}


def gathers(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """How often this rank gathers shared parameters in a step, and in one of evaluation."""
    plan, strategy = build(layout, recipe)
    batch = chain_and_batches(recipe)[1](1).chunks(plan.dp)[strategy.mesh.replica]
    runs = {"train": lambda: strategy.train_step(batch, 1), "evaluate": lambda: strategy.eval_step(batch)}
    counts = {}
    for kind, run in runs.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        counts[kind] = sum(event.count for event in profile.key_averages() if "_allgather_base_" in event.key)
    return counts


def gradients_after_an_evaluation(recipe: Recipe, layout: Layout, evaluate: bool) -> list[list[float]]:
    """This rank's gradients of the second of two steps, with or without an evaluation in between."""
    plan, strategy = build(layout, recipe)
    batch_at = chain_and_batches(recipe)[1]
    for step in (1, 2):
        if step == 2 and evaluate:
            strategy.eval_step(batch_at(0).chunks(plan.dp)[strategy.mesh.replica])
        strategy.train_step(batch_at(step).chunks(plan.dp)[strategy.mesh.replica], step)
    return [local(parameter.grad).flatten().tolist() for parameter in strategy.parameters()]


def bytes_of_state(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """What this rank keeps between steps, in bytes, and what it keeps of AdamW."""
    strategy, _ = _one_step(recipe, layout)
    optimizer = torch.optim.AdamW(strategy.parameters())
    optimizer.step()
    tensors = {
        "weights": list(strategy.parameters()),
        "gradients": [p.grad for p in strategy.parameters()],
        "optimizer": [t for state in optimizer.state.values() for t in state.values()],
    }
    storages = {kind: [local(t).untyped_storage() for t in own] for kind, own in tensors.items()}
    return {kind: sum({s.data_ptr(): s.nbytes() for s in own}.values()) for kind, own in storages.items()}


def losses_of_optimizers(recipe: Recipe, layout: Layout, sections: dict[str, dict]) -> dict[str, list[float]]:
    """The losses of a training with each of some optimizers, sections of a configuration."""
    losses: dict[str, list[float]] = {name: [] for name in sections}
    for name, section in sections.items():
        plan, strategy = build(layout, recipe)
        batch_at = chain_and_batches(recipe)[1]
        optimizer = Optimizer({"decay_vectors": False, "rates": None, "others": None, **section}, strategy)
        for step in range(1, recipe.steps + 1):
            batch = batch_at(step).chunks(plan.dp)[strategy.mesh.replica]
            losses[name].append(strategy.train_step(batch, step).loss)
            optimizer.step(section["lr"])
        strategy.close()
    return losses
