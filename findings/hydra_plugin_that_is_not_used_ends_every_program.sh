#!/usr/bin/env bash
# hydra-nevergrad-sweeper 1.2.0 with hydra-core 1.3.8, Python 3.11: installed and never chosen, it ends every program.
#
# Guess: a sweeper plugin that no configuration names does no harm.
# Seen: Hydra imports all modules of hydra_plugins at start, and this one has a dataclass with a mutable default
# (OptimConf), which Python 3.11 refuses: every @hydra.main program of the environment ends with its ValueError.
# Source: hydra_plugins/hydra_nevergrad_sweeper/config.py; hydra/core/plugins.py, _scan_all_plugins.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps hydra-core==1.3.8 hydra-nevergrad-sweeper==1.2.0 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 pyyaml packaging
cd "$folder"
cat > finding.py << 'PROGRAM'
import subprocess
import sys

PROGRAM = """
import hydra

@hydra.main(version_base=None)
def main(cfg):
    print("ran")

main()
"""
ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
last = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else ""
print("python", sys.version.split()[0], "- guess: ran; seen:", ran.stdout.strip() or last)
if sys.version_info >= (3, 11):
    assert ran.returncode != 0 and "mutable default" in last and "OptimConf" in last, ran.stderr
PROGRAM
venv/bin/python -W ignore finding.py
