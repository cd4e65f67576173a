"""What a user can get wrong about a layout."""


class PlanError(ValueError):
    """A configuration that cannot run. The message states the numbers and a way out, and needs no traceback."""
