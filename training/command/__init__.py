"""From a command line or a Python program to processes that run: modes, jobs of sweeps, ranks that exist, SLURM."""
