"""Gives every Python process that starts with this folder on its path pretend GPUs, before it imports torch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import pretend_cuda

pretend_cuda.install()
