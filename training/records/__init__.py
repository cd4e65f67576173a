"""What a run writes down and shows: metrics, environment, wandb, the progress bar, memory and time.

Nothing in here may end a training run: a lost server, a full disk or a closed terminal is reported once
and the run goes on.
"""

from training.records.environment import describe, mask_secrets
from training.records.memory import peak_memory_bytes
from training.records.metrics import MetricsFile, jsonable, write_json
from training.records.progress import Progress
from training.records.throughput import StepTimes
from training.records.wandb_run import NoLogger, WandbRun

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
