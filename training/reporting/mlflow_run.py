"""MLflow: the run's numbers in a tracking server, or in a file of the run directory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from conf.masking import mask_secrets
from training.reporting.loggers import scalars
from training.reporting.metrics import METRICS, flat, read_records

ID_FILE = "mlflow_id.txt"
_LONGEST_VALUE = 500  # in characters, of the parameters that every server accepts

log = logging.getLogger("training")


class MlflowRun:
    """One MLflow run. A resumed training continues the same MLflow run, and adds the records that this run lacks.

    MLflow cannot remove points. If the run has points of steps that are trained again, as after a crash or a return to
    an earlier checkpoint, a new MLflow run with the records of metrics.jsonl takes its place, and it is marked as
    deleted.
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
        self._last: dict[str, int] = {}  # the last step of each metric
        records, known = read_records(self._run_dir / METRICS), self._run_dir / ID_FILE
        earlier = known.read_text().strip() if known.exists() else None
        for name in self._client.get_run(earlier).data.metrics if earlier is not None else ():
            self._last[name] = max(point.step for point in self._client.get_metric_history(earlier, name))
        continues = max(self._last.values(), default=0) <= (records[-1]["step"] if records else 0)
        if earlier is not None and continues:
            self._id = earlier
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._last.clear()
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self._id = self._client.create_run(number, run_name=run_name).info.run_id
            known.write_text(self._id + "\n")
            for key, value in flat(mask_secrets(run_config)).items():
                self._client.log_param(self._id, key, str(value)[:_LONGEST_VALUE])
        self._add(_points(records))
        if earlier not in (None, self._id):
            self._client.delete_run(earlier)
            log.warning("MLflow's run %s has steps that are trained again, and MLflow cannot remove them. The run %s "
                        "takes its place, and the old one is marked as deleted", earlier, self._id)  # fmt: skip

    def log(self, record: dict, step: int) -> None:
        """Add the numbers of a record."""
        self._add(_points([record]))

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Add the summary and mark the run as finished or failed."""
        numbers = {name: x for name, x in (summary or {}).items() if isinstance(x, int | float) and type(x) is not bool}
        self._add((f"summary/{name}", float(x), int(numbers["steps"])) for name, x in numbers.items())
        self._client.set_terminated(self._id, "FINISHED" if exit_code == 0 else "FAILED")

    def _add(self, points: Iterable[tuple[str, float, int]]) -> None:
        """Add the points that the run lacks; of each metric, steps ascend."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        added, now = [], int(time.time() * 1000)
        for name, value, step in points:
            if step > self._last.get(name, -1):
                added.append(Metric(name, value, now, step))
                self._last[name] = step
        self._client.log_batch(self._id, added)


def _points(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    """Yield the name, the value and the step of each number."""
    return ((name, value, record["step"]) for record in records for name, value in scalars(record).items())
