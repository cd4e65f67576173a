"""A stage's backward in two parts: the gradients of its inputs first, the gradients of its weights later.

Zero-bubble schedules (Qi et al. 2023) send the gradients of inputs at once and fill gaps with the gradients of weights.
torch has the same in ``torch.distributed.pipelining._backward``, which is private and differs between releases. In
torch 2.13 and 2.15, a layer that a stage uses several times raises an error ("backward through the graph a second
time"), a weight of an output that depends on no input silently gets no gradient, and the fused head's product is
computed twice. torch 2.11 fails for every custom autograd function. This module uses only the public autograd graph.

A *boundary* node lies on a path from the outputs to the inputs and has an edge that leads to weights only. The first
part runs backward to the inputs and records the gradients that enter each boundary node. The second part starts at the
boundary nodes, and repeats only the computation that they need for both inputs and weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass
class DeferredWeights:
    """Weights that are reached from the same boundary nodes, and the gradients that have entered these nodes.

    ``roots`` are the nodes of the outputs. They keep the graph alive, also if torch detaches the outputs. ``entered``
    has all gradients of a node. ``given`` has the gradients of an output that does not depend on any input. The second
    part may add other gradients to them, because this output may lead to another boundary node.
    """

    weights: list[Tensor]
    boundary: list[Node]
    roots: Sequence[Node]
    entered: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)
    given: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


def backward_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[object],
    weights: Iterable[Tensor],
) -> tuple[list[Tensor | None], list[DeferredWeights]]:
    """Compute the gradients of ``inputs`` and defer the gradients of ``weights``.

    ``outputs`` are the stage's outputs, none of them a leaf. ``gradients`` are their gradients (None for a scalar
    loss). ``weights`` are leaves. The inputs' ``grad`` does not change. The results are the gradients of the inputs,
    None for an input that needs no gradient, and the argument of ``backward_weights``.
    """
    pairs = [
        (output, torch.ones_like(output) if gradients is None else gradients[i])
        for i, output in enumerate(outputs)
        if output.requires_grad
    ]
    roots = [_node(output) for output, _ in pairs]
    wanted = [tensor for tensor in inputs if _has_gradient(tensor)]
    groups = _groups(roots, {_node(tensor) for tensor in wanted}, {_node(w): w for w in weights if w.requires_grad})
    with ExitStack() as hooks:
        for group in groups:
            for node in group.boundary:
                hooks.enter_context(node.register_prehook(partial(group.entered.__setitem__, node)))
        ends, sent = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        # Unless something before this stage is trained, nothing is wanted.
        found = torch.autograd.grad(ends, wanted, sent, retain_graph=True, allow_unused=True) if wanted else ()
    for group in groups:
        for node in group.boundary:
            if node not in group.entered:  # an output without a path to an input, at which nothing was computed
                group.given[node] = _gradients_of(node, pairs)
    answers = iter(found)
    return [next(answers) if _has_gradient(t) else None for t in inputs], groups


def backward_weights(deferred: list[DeferredWeights]) -> None:
    """Accumulate the deferred gradients into the weights' ``grad``, and forget the graph."""
    for group in deferred:
        edges, gradients = [], []
        for node, entered in (*group.entered.items(), *group.given.items()):
            for i, gradient in enumerate(entered):
                if gradient is not None:
                    edges.append(GradientEdge(node, i))
                    gradients.append(gradient)
        with ExitStack() as hooks:
            # A path from one boundary node to another must not add to the gradients that have entered the latter.
            for node, noted in group.entered.items() if len(group.boundary) > 1 else ():
                hooks.enter_context(node.register_prehook(lambda _, noted=noted: noted))
            # Autograd accumulates, because it copies a gradient that is referenced elsewhere. The gradient of a sum is
            # the same tensor for all summands, and may be the received tensor.
            if edges:
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=group.weights)
    deferred.clear()


def _has_gradient(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.requires_grad


def _node(tensor: Tensor) -> Node:
    """Return the node that computes ``tensor``; for a leaf, the node that accumulates its gradient."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    view = tensor.view_as(tensor).grad_fn
    return view.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]  # a leaf has it


def _gradients_of(node: Node, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the outputs of ``node``, by output number."""
    gradients: dict[int, Tensor | None] = {}
    for output, gradient in pairs:
        if output.grad_fn is node and gradient is not None:
            before = gradients.get(output.output_nr)  # the gradient of the same output, returned twice
            gradients[output.output_nr] = gradient if before is None else before + gradient
    return tuple(gradients.get(i) for i in range(max(gradients, default=-1) + 1))


def _groups(roots: Sequence[Node], inputs: set[Node], weights: dict[Node, Tensor]) -> list[DeferredWeights]:
    """Return the weights that the roots reach, grouped by the boundary nodes that lead to them."""
    order = _children_first(roots)
    on_path: set[Node] = set()
    reached: dict[Node, frozenset[Node]] = {}  # off the path: the weights below a node
    boundary: dict[Node, list[Node]] = {}  # by weight
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        below = frozenset().union(*(reached.get(child, ()) for child in children if child not in on_path))
        if node in inputs or any(child in on_path for child in children):
            on_path.add(node)
            for weight in below:
                boundary.setdefault(weight, []).append(node)
        else:
            reached[node] = below | {node} if node in weights else below
    for root in dict.fromkeys(roots):  # an output without a path to an input
        if root not in on_path:
            for weight in reached[root]:
                boundary.setdefault(weight, []).append(root)
    groups: dict[tuple[Node, ...], DeferredWeights] = {}
    for weight, nodes in boundary.items():
        group = groups.setdefault(tuple(nodes), DeferredWeights([], nodes, roots))
        group.weights.append(weights[weight])
    return list(groups.values())


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes below ``roots``. Each node comes after the nodes to which its edges lead."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return order
