"""Training runs. A Python program uses ``train``, ``load_config`` and ``verify``.

Each of these packages imports only those below it:

command/     from the command line to processes: the modes, jobs of sweeps, ranks that exist already, SLURM
studies/     questions that need many runs: planning, verification, the results of a sweep
run/         one run: its objects, its checks, and the work of each rank from the first step to the summary
callbacks/, optimizer/, export/       the user's code in a run; optimizer and schedules; models for other programs
checkpoint/, reporting/               the files that a run writes
"""

from importlib.util import find_spec
from pathlib import Path


def _check_packages() -> None:
    """Check that the program's path does not hide this project's packages by others, such as another ``models``.

    Raises:
        ImportError: A package is hidden; the message names the folder.
    """
    root = Path(__file__).resolve().parents[1]
    for name in ("common", "conf", "data", "launchers", "models", "parallel", "planner"):
        spec = find_spec(name)
        found = [] if spec is None else spec.submodule_search_locations or [spec.origin]
        places = [place for place in found if place is not None]
        if root / name not in [Path(place).resolve() for place in places]:
            raise ImportError(
                f"the package {name!r} of {root} is hidden by {places[0] if places else 'nothing'}, which comes before "
                f"it on sys.path: rename that, or begin the program with import sys; sys.path.insert(0, {str(root)!r})"
            )


_check_packages()

from training.command.api import Result, load_config, train, verify  # noqa: E402

__all__ = ["Result", "load_config", "train", "verify"]
