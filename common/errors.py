"""Errors that a user can act on: shown as one message, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """The message states the numbers and a way out.

    Attributes:
        repeats: Whether the error would come again if the run were started again.
    """

    repeats = True


class PlanError(UserError, ValueError):
    """A layout that cannot run."""


class DataError(UserError, ValueError):
    """Data that is wrong, or that was asked for in a wrong way."""


class TrainingError(UserError, RuntimeError):
    """A run that cannot start or go on."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""


class LaunchError(UserError, RuntimeError):
    """The processes of a run could not be described, started or brought together."""

    repeats = False
