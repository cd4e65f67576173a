"""Which stages hand tensors to each other by shared memory, and through what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.shared_memory import Inbox, Outbox, Route, open_routes
from parallel.timeline import RECEIVE_ACTIVATION, RECEIVE_GRADIENT
from parallel.trace import Border


@dataclass
class Boxes:
    """One stage's, by what passes: RECEIVE_ACTIVATION or RECEIVE_GRADIENT. ``timeout_s``: of a wait for a tensor."""

    inboxes: dict[str, Inbox] = field(default_factory=dict)
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    timeout_s: float = 300.0

    def close(self) -> None:
        for box in (*self.inboxes.values(), *self.outboxes.values()):
            box.close()


def open_boxes(plan: Plan, mesh: Mesh, borders: Sequence[Border], timeout_s: float) -> dict[int, Boxes]:
    """Those of each of this rank's stages, for a training step's micro-batches. There are none for a neighbour on
    another machine, nor where the system has no such memory. All ranks call it together.

    borders  for each stage of the plan, the tensor it receives from the stage before (and gives a gradient for)
    """
    routes = {}
    for stage in range(1, len(plan.stages)):
        before, after = (mesh.rank_at(mesh.replica, index % plan.pp) for index in (stage - 1, stage))
        if before == after or mesh.rank not in (before, after):
            continue
        routes[Route(before, after, (RECEIVE_ACTIVATION, stage - 1, stage))] = borders[stage].bytes
        if borders[stage].dtype.is_floating_point:
            routes[Route(after, before, (RECEIVE_GRADIENT, stage, stage - 1))] = borders[stage].bytes
    inboxes, outboxes = open_routes(mesh, routes, plan.chunks)
    boxes = {stage.index: Boxes(timeout_s=timeout_s) for stage in plan.stages_of(mesh.position)}
    for (*_, (kind, _, to)), inbox in inboxes.items():
        boxes[to].inboxes[kind] = inbox
    for (*_, (kind, of, _)), outbox in outboxes.items():
        boxes[of].outboxes[kind] = outbox
    return boxes
