"""Checks that all ranks belong to one run: the same code, versions, data, directory and starting weights."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import LaunchError, PlanError, TrainingError
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.strategy import Strategy
from training.checkpoint.init_from import digest_read

_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = (
    "common", "conf", "data", "launchers", "models", "parallel", "planner", "training", "hydra_plugins",
)  # fmt: skip
_APPEARS_S = 10.0  # seconds until another machine must see a new file
_POLL_S = 0.1
_DIGITS = 12
_SHOWN = 3
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by their size in bytes


def check_ranks(mesh: Mesh, setup: Any, alike: bool = False) -> str | None:
    """Compare code, versions, data and starting weights of all ranks. All ranks call this together.

    Args:
        mesh: The connected ranks.
        setup: The setup that this rank has prepared.
        alike: Whether one process has started all ranks. Then only the data can differ, because each rank prepares it.

    Returns:
        A warning about differences if ``launcher.allow_mixed`` is set; None if there are none.

    Raises:
        LaunchError: On every rank: ranks differ. The message names the ranks and both values.
    """
    described = {"data": setup.data_digest} if alike else describe_rank(setup)
    if not (problems := _differing(mesh, described.items())):
        return None
    differs = f"the ranks do not run the same: {'; '.join(problems)}"
    if setup.cfg.launcher.allow_mixed:
        return f"{differs} (launcher.allow_mixed=true)"
    if alike or all(problem.startswith("data: ") for problem in problems):
        how = (
            "Each rank prepares the data itself: prepare() and read() must give the same samples in every process. If "
            "they draw, give them a generator with a fixed seed, such as random.Random(0); if they read files, the same"
        )
    else:
        how = "Give every machine the same working copy, packages, data and weights"
    raise LaunchError(f"{differs}. {how}; launcher.allow_mixed=true makes this a warning")


def check_nodes(mesh: Mesh, plan: Plan, typed: int | None, local_size: int) -> None:
    """Check that all nodes have equally many ranks if each node forms a group. All ranks call this together.

    Args:
        mesh: The connected ranks.
        plan: The layout.
        typed: The size of the groups that the user has typed; None if the nodes determine it.
        local_size: The number of ranks on this rank's node.

    Raises:
        PlanError: On every rank: nodes have different numbers of ranks.
    """
    sizes = dict.fromkeys(map(tuple, mesh.gather((socket.gethostname(), local_size))))
    if len({size for _, size in sizes}) > 1 and typed is None and 1 < plan.group < mesh.dp:
        listed = ", ".join(f"{size} on {node}" for node, size in sizes)
        raise PlanError(
            f"parallel={plan.strategy} groups the replicas of each node, and the nodes have different numbers of ranks "
            f"({listed}): start equally many on each (srun --ntasks-per-node, torchrun --nproc-per-node), or set "
            "parallel.shard to a size of groups"
        )


def check_run_directory(mesh: Mesh, run_dir: Path, writes: bool, timeout_s: float) -> str | None:
    """Check that all ranks see a file that rank 0 makes in the run directory. All ranks call this together.

    Args:
        mesh: The connected ranks.
        run_dir: The run directory.
        writes: Whether this rank will write a part of each checkpoint.
        timeout_s: The timeout of the ranks in seconds. They wait for the file half as long, at most ``_APPEARS_S``.

    Returns:
        A warning about ranks that have another directory and write nothing; None if there are none.

    Raises:
        LaunchError: On every rank: ranks that write have another directory. The message names them.
    """
    # The name is new on every machine: network file systems cache for a while that a file does not exist.
    token = run_dir / mesh.gather(f".shared-{secrets.token_hex(8)}")[0]
    if mesh.rank == 0:
        with suppress(OSError):  # a full or read-only disk is reported when a file is to be kept
            token.touch()
    waited_s, deadline = min(_APPEARS_S, timeout_s / 2), time.monotonic()
    while not (seen := os.path.exists(token)) and time.monotonic() < deadline + waited_s:
        time.sleep(_POLL_S)
    answers = mesh.gather((seen, writes, socket.gethostname()))
    if mesh.rank == 0:
        with suppress(OSError):
            token.unlink()
    other = {rank: (writing, node) for rank, (saw, writing, node) in enumerate(answers) if not saw}
    if not other or 0 in other:
        return None
    listed = ", ".join(f"{rank} ({node})" for rank, (_, node) in other.items())
    differs = (
        f"{'ranks' if len(other) > 1 else 'rank'} {listed} {'do' if len(other) > 1 else 'does'} not see rank 0's run "
        f"directory {run_dir} ({answers[0][2]}): a file that rank 0 made there did not appear in {waited_s:g} s"
    )
    if not any(writing for writing, _ in other.values()):
        return f"{differs}. They cannot load a checkpoint, so the run cannot be resumed or restarted"
    raise LaunchError(
        f"{differs}. Parts of each checkpoint would be written there: set hydra.run.dir to a directory that all "
        "machines share, or train.checkpoint_every=null"
    )


def describe_rank(setup: Any) -> dict[str, str | None]:
    """Return the versions and digests that must be equal on all ranks, by name; None for an unknown value."""
    return {
        "project files": _project_digest(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "data": setup.data_digest,
        "model.init_from": digest_read(setup.cfg, setup.chain),
    }


def check_weights(strategy: Strategy, allow_mixed: bool = False) -> str | None:
    """Compare the copies of the same tensor on several ranks: in replicas, and of a tied parameter.

    All ranks call this together, between two steps.

    Args:
        strategy: This rank's part of the model.
        allow_mixed: Whether to warn about different weights instead of raising: processors of several kinds may round
            differently.

    Returns:
        The warning; None if the weights are equal.

    Raises:
        TrainingError: On every rank: some weights differ. The message names the ranks.
    """
    mesh = strategy.mesh
    if mesh.size == 1:
        return None
    if not (problems := _differing(mesh, _digests_of_weights(strategy))):
        return None
    more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    differs = f"ranks do not hold the same weights: {'; '.join(problems[:_SHOWN])}{more}"
    if allow_mixed:
        return f"{differs} (launcher.allow_mixed=true)"
    differs += "".join(f". {axis.hint}" for axis in strategy.axes if axis.hint)
    raise TrainingError(
        f"{differs}. Gradients are averaged and weights are not, so they would stay different. Give every machine the "
        "same files (model.init_from, train.resume), and keep no numbers in a layer that an evaluation changes; if "
        "processors of several kinds round differently, launcher.allow_mixed=true makes this a warning"
    )


def _digests_of_weights(strategy: Strategy) -> list[tuple[str, str]]:
    """Return (canonical name, digest of the bits) for each parameter and each saved buffer.

    For a sharded tensor, this is the digest of this rank's part.
    """
    digests = set()
    for stage in strategy.stages:
        for name, tensor in stage.layers.state_dict().items():
            canonical = strategy.chain.canonical(name)
            piece = strategy.piece(canonical, tensor)
            share = f" (share {strategy.mesh.axis(*piece.axes).index})" if piece.axes else ""
            digest = hashlib.sha256(_bits(piece.tensor)).hexdigest()[:_DIGITS]
            digests.add((canonical + share, digest))
    return sorted(digests)


def _bits(tensor: Tensor) -> bytes:
    """Return a tensor's bits as bytes; for a matrix, the sums of its rows, computed on the tensor's device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().view(_WHOLE[real.itemsize])
    rows = bits.sum(dim=tuple(range(1, bits.dim())), dtype=bits.dtype) if bits.dim() > 1 else bits
    return rows.cpu().numpy().tobytes()


def _differing(mesh: Mesh, values: Iterable[tuple[str, str | None]]) -> list[str]:
    """Compare named values of all ranks, except None. Return a line per differing name with its values and ranks."""
    answers = mesh.gather((socket.gethostname(), list(values)))
    found: dict[str, dict[str, list[int]]] = {}
    for rank, (_, named) in enumerate(answers):
        for name, value in named:
            if value is not None:
                found.setdefault(name, {}).setdefault(value, []).append(rank)

    def described(value: str, ranks: list[int]) -> str:
        machines = ", ".join(dict.fromkeys(answers[rank][0] for rank in ranks))
        return f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({machines})"

    differing = {name: having.items() for name, having in found.items() if len(having) > 1}
    return [f"{name}: {', '.join(starmap(described, having))}" for name, having in differing.items()]


def _project_digest() -> str:
    digest = hashlib.sha256()
    files = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*") if path.suffix in (".py", ".yaml")]
    for path in sorted([_ROOT / "train.py", *files]):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]
