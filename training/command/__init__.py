"""From a command line or a Python program to processes that run.

app.py         composes words, converts the configuration to plain data and calls its mode
modes/         the modes: mode=NAME is NAME.py
launch.py      a run of training or evaluation: prepared, then started on this machine, among ranks, or in a queue
ranks.py       ranks that exist already (torchrun, srun): rank 0 tells the others what to run
sweep_jobs.py  the jobs of a sweep: which jobs still have to run, and how each runs or is queued
slurm_job.py   a run as a job of a SLURM cluster
api.py         train, load_config and verify, for Python programs
errors.py      errors that the user can act on, as one message and an exit code
preload.py     the imports of the process that forks workers
"""
