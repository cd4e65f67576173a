#!/usr/bin/env bash
# wandb 0.31.0: init of an offline run without jobs imports wandb's launch agent and public API.
#
# Guess: an offline run with disable_job_creation=True imports what logs numbers. The agent, which takes jobs from a
# queue and starts them, and the client of the public API are imported by programs that use them.
# Seen: wandb.init imports both, to ask whether a launched job has staged inputs. It takes about as long as the rest
# of init. With a module that has no inputs in place of wandb.sdk.launch.inputs.internal, init imports neither, and the
# run is complete.
# Source: wandb/sdk/wandb_run.py, Run._detect_and_apply_job_inputs, and wandb/sdk/launch/__init__.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check wandb==0.31.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import sys
import time
from pathlib import Path
from types import ModuleType

import wandb

INPUTS = "wandb.sdk.launch.inputs.internal"


class NoInputs:
    def apply(self, run):
        pass


replaced = sys.argv[1] == "replaced"
if replaced:
    sys.modules[INPUTS] = ModuleType(INPUTS)
    sys.modules[INPUTS].StagedLaunchInputs = NoInputs
before = {*sys.modules}
began = time.perf_counter()
settings = wandb.Settings(mode="offline", silent=True, console="off", disable_job_creation=True, root_dir=".")
run = wandb.init(settings=settings)
seconds = time.perf_counter() - began
imported = {*sys.modules} - before
run.log({"loss": 1.0})
run.finish()
asked = ("wandb.sdk.launch.agent.agent", "wandb.apis.public")
seen = [name for name in asked if name in imported]
print(f"wandb {wandb.__version__}, inputs {sys.argv[1]}: {seconds:.2f} s, {len(imported)} modules; "
      f"guess: none of {asked}; seen: {seen}")
assert seen == ([] if replaced else [*asked])
assert any(Path("wandb").glob("offline-run-*/run-*.wandb"))
PROGRAM
venv/bin/python -W ignore finding.py "as they are"
venv/bin/python -W ignore finding.py "as they are"
venv/bin/python -W ignore finding.py replaced
