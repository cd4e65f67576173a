"""mode=predict: write the outputs of a checkpoint's model for a split."""

from __future__ import annotations

from conf.composition import Composed
from training.command.app import check_alone
from training.command.launch import launch


def run(composed: Composed) -> None:
    """Predict in the layout of the command; answers to prompts are generated in one process, as by mode=sample."""
    if not any(composed.cfg.data.get(key) for key in ("answer", "messages", "chosen")):
        launch(composed)
        return
    check_alone(composed)

    from training.run.predict import predict_here

    print(predict_here(composed.cfg, composed.cfg.predict.split, composed.run_dir), flush=True)
