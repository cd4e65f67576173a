"""Runs what docs/own_model.md and docs/extending.md add: ``extended_runs.py FOLDER RUNS MISTAKES``.

It is started in a copy of the repository to which their files are added.

Both are JSON, command lines by name: trainings, all of whose ranks are of one pool, and commands that are refused.
"""

import io
import json
import multiprocessing
import sys
from contextlib import redirect_stderr
from multiprocessing import forkserver
from pathlib import Path

if __name__ == "__main__":  # the process that forks the ranks imports what they need while this one does
    multiprocessing.set_forkserver_preload(["preloaded"])
    forkserver.ensure_running()

from composed import config, losses, run_on_rank
from ranks import Ranks

from conf.instantiate import to_dict, use_code_of
from train import main as train
from training.run.prepare import prepare


def main() -> None:
    """Write the losses of each run to FOLDER/losses.json, exit code and error of each mistake to mistakes.json."""
    folder, runs, mistakes = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    pool, results, said = Ranks(), {}, {}
    for name, overrides in runs.items():
        cfg = config(*overrides)
        use_code_of(cfg)
        (folder / name).mkdir()
        args = to_dict(cfg), str(folder / name), str(folder / f"{name}.meeting")
        pool.run(prepare(cfg).plan.processes, run_on_rank, *args)
        results[name] = losses(folder / name)
    pool.close()
    (folder / "losses.json").write_text(json.dumps(results))
    for name, words in mistakes.items():
        with redirect_stderr(io.StringIO()) as err:
            said[name] = train([*words, "logger=none", f"hydra.run.dir={folder}/{name}"]), err.getvalue()
    (folder / "mistakes.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
