"""Runs as jobs of a SLURM cluster: ``submit`` queues them, ``follow`` waits for them, ``task`` runs in them."""
