"""How far a run was from another: every number of every step, and every tensor."""

from __future__ import annotations

import torch
from cases import Result


def weights_of(run: list[Result]) -> dict[str, torch.Tensor]:
    """The whole model's weights, put together from all ranks; replicas must hold the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for result in run:
        for name, tensor in result.state.items():
            if name in whole:
                assert torch.equal(whole[name], tensor), f"replicas differ in {name}"
            whole[name] = tensor
    return whole


def assert_same_training(run: list[Result], reference: Result, tolerance: float) -> None:
    """Losses and gradient norms of every step, evaluations, and every final weight tensor by norm, relative.

    Weights that hardly move would agree by standing still, so each is also compared by how far it moved, to a
    hundred times the tolerance (the last bits of a weight of 1 are many of its small movement).
    """
    for rank, result in enumerate(run):
        assert result.losses == run[0].losses, f"rank {rank} has other losses than rank 0"
        assert result.norms == run[0].norms, f"rank {rank} has other gradient norms than rank 0"
        assert result.evaluations == run[0].evaluations, f"rank {rank} has other evaluations than rank 0"
    far = {
        "loss": _farthest(run[0].losses, reference.losses),
        "gradient norm": _farthest(run[0].norms, reference.norms),
    }
    for (loss, count, *_), (wanted_loss, wanted_count, *_) in zip(
        run[0].evaluations, reference.evaluations, strict=True
    ):
        assert count == wanted_count, f"an evaluation counted {count} terms, not {wanted_count}"
        far["evaluation"] = max(far.get("evaluation", 0.0), _farthest([loss], [wanted_loss]))
    weights = weights_of(run)
    assert weights.keys() == reference.state.keys()
    for name, wanted in reference.state.items():
        if not wanted.numel():
            continue
        rounding = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
        wanted, start = wanted.double(), reference.initial[name].double()
        error, moved = (weights[name].double() - wanted).norm(), (wanted - start).norm()
        # A bias before a BatchNorm has no gradient but rounding, and moves by that.
        moved = max(moved, 1000 * rounding * wanted.norm())
        far[name] = max(error / wanted.norm(), error / moved / 100).item()
    wrong = {what: distance for what, distance in far.items() if not distance <= tolerance}
    assert not wrong, f"farther than {tolerance} from single, relative: {wrong}"


def _farthest(values: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
