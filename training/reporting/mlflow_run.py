"""MLflow: the run's numbers in a tracking server, or in a file of the run directory."""

from __future__ import annotations

import os
from pathlib import Path

from conf.masking import mask_secrets
from training.reporting.loggers import scalars
from training.reporting.metrics import flat

ID_FILE = "mlflow_id.txt"
_LONGEST_VALUE = 500  # in characters, of the parameters that every server accepts


class MlflowRun:
    """One MLflow run. A resumed training continues the same MLflow run.

    MLflow cannot remove points: if a step is logged again, its first values are kept.
    """

    requires = "mlflow-skinny"

    def __init__(
        self,
        run_dir: str | Path,
        run_config: dict,
        run_name: str,
        tracking_uri: str | None = None,
        experiment: str = "one-word-parallel",
    ) -> None:
        """Start the run with the options of conf/logger/mlflow.yaml; ``run_config`` is stored with secrets masked."""
        import mlflow  # pyright: ignore[reportMissingImports]  # only logger=mlflow needs it

        self._run_dir = Path(run_dir).absolute()
        uri = tracking_uri or mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        if uri is None:  # MLflow prefers a data base, which needs more packages; files are enough for one run
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (self._run_dir / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(uri)
        self._last: dict[str, int] = {}  # the last step of each metric of the resumed run
        known = self._run_dir / ID_FILE
        if known.exists():
            self._id = known.read_text().strip()
            for name in self._client.get_run(self._id).data.metrics:
                self._last[name] = max(point.step for point in self._client.get_metric_history(self._id, name))
            return
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run_name).info.run_id
        known.write_text(self._id + "\n")
        for key, value in flat(mask_secrets(run_config)).items():
            self._client.log_param(self._id, key, str(value)[:_LONGEST_VALUE])

    def log(self, record: dict, step: int) -> None:
        """Add the numbers of a record."""
        for name, value in scalars(record).items():
            self._log(name, value, step)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Add the summary and mark the run as finished or failed."""
        summary = summary or {}
        for name, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._log(f"summary/{name}", float(value), summary["steps"])
        self._client.set_terminated(self._id, "FINISHED" if exit_code == 0 else "FAILED")

    def _log(self, name: str, value: float, step: int) -> None:
        if step > self._last.get(name, -1):
            self._client.log_metric(self._id, name, value, step=step)
