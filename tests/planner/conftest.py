"""Where the helpers of the tests of strategies are found, here and on the ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parallel"))
