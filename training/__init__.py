"""Training runs. A Python program uses ``train``, ``load``, ``load_config`` and ``verify``.

Each of these packages imports only those below it:

command/     from the command line to processes: the modes, jobs of sweeps, ranks that exist already, SLURM
studies/     questions that need many runs: planning, verification, the results of a sweep
run/         one run: its objects, its checks, and the work of each rank from the first step to the summary
callbacks/, optimizer/, export/       the user's code in a run; optimizer and schedules; models for other programs
checkpoint/, reporting/               the files that a run writes
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "common.namesakes" not in sys.modules:  # loaded by its path, because ``common`` may be a module of the user
    _spec = spec_from_file_location("common.namesakes", Path(__file__).resolve().parents[1] / "common/namesakes.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

from training.command.api import Result, load, load_config, train, verify  # noqa: E402

__all__ = ["Result", "load", "load_config", "train", "verify"]
