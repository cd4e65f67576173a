"""What is measured, and against whom. One command each; tables go to benchmarks/results."""

from training import load_config  # noqa: F401  before others, as it joins packages of the same names
