"""Checks that a run fits into memory, before any process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.cuda import get_device_properties

from common.machine import check_memory
from conf.schema import Root
from launchers import World
from planner.memory import Memory, check_gpus, memory_of_ranks
from planner.work import weights_of
from training.optimizer.kinds import states_of

if TYPE_CHECKING:
    from training.run.setup import Setup


def check_memory_of(setup: Setup, world: World | None) -> None:
    """Check that a run with all ranks on this machine fits into its memory, before a rank is started.

    This counts the minimum memory: processes, weights, gradients and optimizer states. If there are GPUs, they hold
    all of these except the processes. (mode=plan estimates all of the memory, which takes seconds.)

    Raises:
        UserError: The run does not fit.
    """
    plan, cfg = setup.plan, setup.cfg
    if world is not None and world.local_size < world.size:
        return
    on_cpu = plan.device_type == "cpu"
    check_memory(
        sum(rank.process + on_cpu * rank.state for rank in certain_memory(setup)),
        f"model={cfg.model.name} parallel={plan.strategy} in {plan.processes} processes",
        "choose a smaller model or train.global_batch_size, more parallel.chunks, or fewer processes (see mode=plan)",
    )


def check_gpu_memory(setup: Setup) -> None:
    """Check that this machine's GPUs have the minimum memory that their ranks need. Raises PlanError."""
    if setup.plan.gpus is not None and not setup.plan.devices:
        check_gpus(setup.plan, certain_memory(setup), lambda gpu: get_device_properties(gpu).total_memory)


def certain_memory(setup: Setup) -> list[Memory]:
    """Return the minimum memory that each rank needs: for its process, weights, gradients and optimizer state."""
    return memory_of_ranks(setup.plan, weights_of(setup.chain), certain_states(setup.cfg))


def certain_states(cfg: Root) -> int | None:
    """Return the minimum number of parameter-sized optimizer states per parameter; None if nothing is trained."""
    return states_of(cfg.optim, unknown=0) if cfg.mode == "train" else None


def check_microbatch_fits(setup: Setup) -> None:
    """Check that one micro-batch fits into memory, from the size of one sample.

    Raises:
        UserError: The micro-batch does not fit.
    """
    one = setup.some(1)
    size = sum(tensor.nbytes for tensor in one.tensors)
    count = setup.plan.microbatch_size
    check_memory(
        2 * size * count,
        f"a micro-batch of {count} samples of {size / 2**20:,.1f} MiB",
        "choose more parallel.chunks, a smaller train.global_batch_size or smaller samples",
    )
