"""What is measured, and against whom. One command each; tables go to benchmarks/results."""
