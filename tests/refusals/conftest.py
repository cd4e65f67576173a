"""Where the tests of refusals find each other's modules."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # ``table``, ``files``
