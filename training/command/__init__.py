"""From a command line or a Python program to processes that run.

app.py         words are composed, the configuration is made plain, and its mode is called
modes/         what each mode does: mode=NAME is NAME.py
launch.py      a run of training or evaluation: prepared, then started on this machine, among ranks, or in a queue
ranks.py       ranks that exist already (torchrun, srun): rank 0 tells the others what to run
sweep_jobs.py  the jobs of a sweep: which still have to run, and how each is run or queued
slurm_job.py   a run as a job of a SLURM cluster
api.py         train, load_config and verify, for Python programs
errors.py      errors that the user can act on, as one message and an exit code
preload.py     what the process that forks workers imports
"""
