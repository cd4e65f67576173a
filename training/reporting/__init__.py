"""The output of a run: metrics, environment, loggers, the progress bar, the summary and the timeline.

All pages share the layout page.html.jinja, and all figures the style in plot.py.

A lost server, a full disk or a closed terminal does not end a training run: it is reported once, and the run continues.
"""

from training.reporting.metrics import METRICS, SUMMARY, MetricsFile, write_json
from training.reporting.recorder import CsvLogger, NoLogger, Progress, describe
from training.reporting.wandb_run import WandbRun

__all__ = [
    "METRICS",
    "SUMMARY",
    "CsvLogger",
    "MetricsFile",
    "NoLogger",
    "Progress",
    "WandbRun",
    "describe",
    "write_json",
]
