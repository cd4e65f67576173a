"""Runs what docs/extending.md adds, from inside a copy of the repository: ``extended_runs.py FOLDER RUNS``.

``RUNS`` is JSON: a name and a command line for each run. All ranks are of one pool, which is started once.
"""

import json
import sys
from pathlib import Path

from composed import config, losses, run_on_rank
from ranks import Ranks

from conf.instantiate import to_dict
from training.run.prepare import prepare


def main() -> None:
    """Write the losses of each run, by its name, to FOLDER/losses.json."""
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    pool, results = Ranks(), {}
    for name, overrides in runs.items():
        cfg = config(*overrides)
        (folder / name).mkdir()
        args = to_dict(cfg), str(folder / name), str(folder / f"{name}.meeting")
        pool.run(prepare(cfg).plan.processes, run_on_rank, *args)
        results[name] = losses(folder / name)
    pool.close()
    (folder / "losses.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
