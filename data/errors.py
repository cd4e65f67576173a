"""The error for what a user can put right."""


class DataError(ValueError):
    """The data or how it was asked for is wrong; the message states the numbers and a way out."""
