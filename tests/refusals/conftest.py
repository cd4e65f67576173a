"""Where the tests of refusals find each other's modules, and those of the tests of training."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "training")]  # ``table``, ``files``; ``composed``
