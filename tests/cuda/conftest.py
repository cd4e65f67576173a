"""Ranks whose GPUs are pretended (see ``pretend_cuda``), for the cases of ``tests/parallel``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``gpu_cases``, here and on the ranks
for other in ("parallel", "training"):  # ``cases``, ``cells``, ``commandline``, ``composed``
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / other))
