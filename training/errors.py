"""What a user can do something about: shown as one message, without a traceback."""

from data.errors import DataError
from launchers.errors import LaunchError
from parallel.errors import PlanError


class TrainingError(RuntimeError):
    """A run that cannot start or go on. The message states the numbers and what to try."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""


USER_ERRORS = (TrainingError, PlanError, DataError, LaunchError)
REPEATING = (TrainingError, PlanError, DataError)  # would come again if the run were started again
