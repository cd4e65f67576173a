"""From a command line or a Python program to processes that run: modes, sweeps' jobs, ranks that exist, SLURM."""
