"""What is measured, and against whom. One command each; tables go to benchmarks/results."""

from training import load_config  # noqa: F401  an error that names the folder, where another one hides this project's
