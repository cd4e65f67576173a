"""The axes of the mesh, one class per file. Each class defines how the ranks along its axis divide the work of a step.

``AXES`` lists the classes. Planning, training, verification and the planner ask each axis the questions of
``parallel.axes.axis.Axis``. An axis of this project also has its key in ``parallel.layout.Layout`` and
``conf.schema.Parallel``. A user's own axis needs only the key ``parallel.axes``.
"""

from __future__ import annotations

from pkgutil import resolve_name

from parallel.axes.axis import Axis
from parallel.axes.context import ContextParallel
from parallel.axes.experts import ExpertParallel
from parallel.axes.pipeline import PipelineStages
from parallel.axes.replicas import Replicas
from parallel.axes.shards import Shards
from parallel.axes.tensor import TensorParallel
from parallel.layout import Layout

# In the order of the mesh axes with parallel.order=dp_pp.
AXES: tuple[type[Axis], ...] = (Replicas, Shards, ExpertParallel, PipelineStages, ContextParallel, TensorParallel)


def known_axes(layout: Layout) -> list[type[Axis]]:
    """Return all axes, including those along which a layout has only one rank."""
    return [*AXES, *(resolve_name(path) for _, path, _ in layout.axes)]


def axes_of(layout: Layout) -> list[tuple[str, type[Axis]]]:
    """Return the name in the mesh and the class of each axis along which a layout has several ranks."""
    found = [(axis.mesh_axes[0], axis) for axis in AXES if axis.is_used(layout)]
    return found + [(name, resolve_name(path)) for name, path, ranks in layout.axes if ranks > 1]
