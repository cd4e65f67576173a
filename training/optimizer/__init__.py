"""How parameters are updated.

optimizer.py   the optimizer over this rank's share of the parameters, and its state in checkpoints
groups.py      the rate and the weight decay of each parameter
muon.py        hidden matrices, and Muon in the gradients' precision
kinds.py       what is known of torch's optimizers: what an update depends on, and the states that they keep
schedules.py   the learning-rate schedules
checks.py      checks of the section ``optim``
"""

from training.optimizer.optimizer import Optimizer
from training.optimizer.schedules import Constant, CosineWarmup, Step

__all__ = ["Constant", "CosineWarmup", "Optimizer", "Step"]
