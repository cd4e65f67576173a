"""Facts about optimizers: the kind of their updates, and the number of tensors that they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.chain import Chain
from training.optimizer.muon import hidden_matrices

# Values of ``optim.update``: the update of an element depends only on this element's gradients, or on its tensor's.
ELEMENTWISE, PER_PARAMETER = "elementwise", "per_parameter"
# For torch's optimizers: the kind of update, and the number of state tensors of a parameter's size. Adafactor keeps
# rows and columns.
_OF_TORCH = {
    "Adadelta": (ELEMENTWISE, 2), "Adagrad": (ELEMENTWISE, 1), "Adam": (ELEMENTWISE, 2), "AdamW": (ELEMENTWISE, 2),
    "Adamax": (ELEMENTWISE, 2), "ASGD": (ELEMENTWISE, 1), "NAdam": (ELEMENTWISE, 2), "RAdam": (ELEMENTWISE, 2),
    "RMSprop": (ELEMENTWISE, 1), "Rprop": (ELEMENTWISE, 2), "SGD": (ELEMENTWISE, 0), "SparseAdam": (ELEMENTWISE, 2),
    "Adafactor": (PER_PARAMETER, 0), "Muon": (PER_PARAMETER, 1),
}  # fmt: skip


def _of_torch(section: Mapping[str, Any]) -> tuple[str, int] | None:
    module, _, name = section["_target_"].rpartition(".")
    return _OF_TORCH.get(name) if f"{module}.".startswith("torch.optim.") else None


def update_of(section: Mapping[str, Any]) -> str | None:
    """Return the kind of update of the section's optimizer: "elementwise" or "per_parameter"; None if unknown."""
    known = _of_torch(section)
    return section.get("update") if known is None else known[0]


def states_of(section: Mapping[str, Any], unknown: int = 2) -> int:
    """Return the number of parameter-sized states that an optimizer keeps per parameter.

    The number is ``unknown`` if the optimizer is not torch's. ``others`` of the section do not count.
    """
    known = _of_torch(section)
    momentum = section["_target_"].endswith(".SGD") and bool(section.get("momentum"))
    return unknown if known is None else known[1] + momentum


def mean_states(section: Mapping[str, Any], chain: Chain) -> float:
    """Return the number of parameter-sized states per parameter of the section's optimizers, averaged over a model."""
    others = section.get("others")
    if others is None:
        return states_of(section)
    sizes = {name: p.numel() for name, p in chain.skeleton().named_parameters() if p.requires_grad}
    share = sum(sizes[name] for name in hidden_matrices(chain)) / sum(sizes.values())
    return share * states_of(section) + (1 - share) * states_of(others)
