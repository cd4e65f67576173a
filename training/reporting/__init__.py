"""What a run writes down and shows: metrics, environment, wandb, the progress bar, memory and time.

Nothing in here may end a training run: a lost server, a full disk or a closed terminal is reported once
and the run goes on.
"""

from training.reporting.environment import describe, mask_secrets
from training.reporting.memory import peak_memory_bytes
from training.reporting.metrics import MetricsFile, jsonable, write_json
from training.reporting.progress import Progress
from training.reporting.throughput import StepTimes
from training.reporting.wandb_run import NoLogger, WandbRun

__all__ = [
    "MetricsFile",
    "NoLogger",
    "Progress",
    "StepTimes",
    "WandbRun",
    "describe",
    "jsonable",
    "mask_secrets",
    "peak_memory_bytes",
    "write_json",
]
