"""How a run goes: the loop, the optimizer step, checkpoints, records and reports."""
