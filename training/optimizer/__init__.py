"""The update of parameters.

optimizer.py   the optimizer over this rank's share of the parameters, and its state in checkpoints
average.py     the running average of the weights
groups.py      the rate, the weight decay and the frozen steps of each parameter
muon.py        hidden matrices, and Muon in the gradients' precision
kinds.py       facts about optimizers: the kind of their updates, and the number of states that they keep
schedules.py   the learning-rate schedules
checks.py      checks of the section ``optim``
"""

from training.optimizer.optimizer import Optimizer
from training.optimizer.schedules import WSD, Constant, CosineWarmup, Linear, Step

__all__ = ["WSD", "Constant", "CosineWarmup", "Linear", "Optimizer", "Step"]
