"""Runs as jobs of a SLURM cluster: ``submit`` queues them, ``follow`` waits for them, ``task`` is what runs in them."""
