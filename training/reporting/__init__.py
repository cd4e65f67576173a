"""The output of a run.

recorder.py       writes the numbers of a run to metrics.jsonl, the loggers and the progress bar
loggers.py        the interface of loggers, and the one for CSV files
*_run.py          wandb, TensorBoard, MLflow, Trackio
progress.py       the progress bar with the remaining time
environment.py    the environment of a run: commit, machine, packages, command
metrics.py        metrics.jsonl and other files of numbers
summary.py        summary.json, at the end
utilization.py    the model FLOPs utilization (MFU)
console.py        the text on the console: configuration, plan, mode=plan's table of memory, results
timeline.py       train.trace: the picture of a pipeline's step
run_directory.py  one run at a time in a directory
job_record.py     job.json of a sweep's job
page.py, plot.py  the layout of all HTML pages, and the style of all figures

A lost server, a full disk or a closed terminal does not end a training run. It is reported once, and the run continues.
"""

from training.reporting.environment import describe
from training.reporting.loggers import CsvLogger, NoLogger
from training.reporting.wandb_run import WandbRun

__all__ = ["CsvLogger", "NoLogger", "WandbRun", "describe"]
