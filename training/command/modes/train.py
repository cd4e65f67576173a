"""mode=train: train, from the first step or from a checkpoint."""

from __future__ import annotations

from conf.composition import Composed
from training.command.launch import is_queued, launch
from training.studies.planning import is_automatic


def run(composed: Composed) -> None:
    """Train. At the end, print some text of a language model, and compare an automatic layout with its prediction."""
    cfg, run_dir, automatic = composed.cfg, composed.run_dir, is_automatic(composed.cfg)
    entropy = launch(composed)
    if is_queued(composed):
        return
    if composed.job is None:
        from training.command.modes.sample import closing_sample  # it imports torch: workers start before

        print(closing_sample(cfg, run_dir, entropy), end="", flush=True)
    if automatic:
        from training.studies.planning.choice import compared_with_prediction

        print(compared_with_prediction(run_dir), end="", flush=True)
