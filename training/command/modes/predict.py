"""mode=predict: write the outputs of a checkpoint's model for a split."""

from __future__ import annotations

from conf.composition import Composed
from training.command.app import check_alone
from training.command.launch import launch


def run(composed: Composed) -> None:
    """Predict in the layout of the command; answers to prompts are generated in one process, as by mode=sample."""
    cfg, run_dir = composed.cfg, composed.run_dir
    if not any(cfg.data.get(key) for key in ("answer", "messages", "chosen")):
        launch(composed)
        return
    check_alone(composed)

    from training.run.predict import describe_predictions, predict, prepared, writing

    restored, source = prepared(cfg, cfg.predict.split)
    with writing(run_dir, cfg.predict.split, source, True) as put:
        predict(cfg, restored, source, put)
    print(describe_predictions(run_dir, cfg.predict.split, source), flush=True)
