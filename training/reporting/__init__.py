"""What a run writes down and shows: metrics, environment, loggers, the progress bar, the summary and the timeline.

How all pages look is in page.html.jinja, how all figures do in plot.py.

A lost server, a full disk or a closed terminal ends no training run: it is reported once, and the run goes on.
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
