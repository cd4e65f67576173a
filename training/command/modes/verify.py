"""mode=verify: prove that every layout trains a model as one process does."""

from __future__ import annotations

from common.errors import TrainingError
from conf import COMMAND
from conf.composition import Composed


def run(composed: Composed) -> None:
    """Compare every layout with one process, and write the certificate.

    Raises:
        TrainingError: A layout trains differently, no layout could be compared, or the command is a job of a sweep.
    """
    cfg = composed.cfg
    if composed.job is not None or composed.choices is None:
        raise TrainingError("mode=verify cannot be a job of a sweep or of train(): run it alone, or training.verify()")
    from training.studies.verification.report import prove

    report = prove(cfg, composed.run_dir, cfg[COMMAND]["typed"])
    if not report.ok:
        said = "is not the same in every layout" if report.failed else "could not be compared"
        raise TrainingError(f"model={cfg.model.name} {said}; see above")
