"""mode=plan: print the layout of a run and the memory of each rank."""

from __future__ import annotations

from conf.composition import Composed
from launchers import stopping
from training.command.launch import preload, prepared
from training.studies.planning import is_automatic


def run(composed: Composed) -> None:
    """Print the plan and the memory of every rank; with ``parallel=auto``, the best layouts. Nothing is trained."""
    stopping.at_once()
    cfg = composed.cfg
    if cfg.parallel.name == "auto":
        from training.studies.planning.paper import on_paper, plan_on_paper

        if on_paper(cfg):
            print(plan_on_paper(cfg, composed.run_dir, composed.words()))
            return
    preload(composed, is_automatic(cfg))
    setup = prepared(composed)

    from planner.memory import memory_of_ranks
    from training.callbacks.averaging import states_of_run
    from training.reporting.console import describe_memory, describe_sent
    from training.run.prepare import describe

    print(describe(setup), flush=True)
    layers, _ = setup.work
    ranks = memory_of_ranks(setup.plan, layers, states_of_run(cfg, setup.chain))
    print("\n".join(["", describe_memory(ranks), *describe_sent(setup.plan, layers)]))
