"""Objects that a Python program gives to a run: a configuration can only name them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from common.errors import UserError

GIVEN = "models.given.given"  # the _target_ of a section whose object is given

_objects: dict[str, Any] | None = None


def set_given(objects: Mapping[str, Any] | None) -> None:
    """Replace the objects that are given in this process, by key; None where no Python program runs the training."""
    global _objects
    _objects = None if objects is None else dict(objects)


def from_python() -> bool:
    """Whether the run was started by a Python program, not by the command line."""
    return _objects is not None


def take(key: str, fingerprint: str) -> Any:
    """Return the object with this key.

    Args:
        key: Such as "model".
        fingerprint: That of the object which the configuration was made for; "" where it does not matter.

    Raises:
        UserError: If this process was given none, or another.
    """
    if _objects is None or key not in _objects:
        raise UserError(
            f"{key} was given by a Python program and is not in the configuration: give it again, by "
            f"training.train(..., {key}=...)"
        )
    if fingerprint != getattr(_objects[key], "fingerprint", ""):
        raise UserError(
            f"this process was given a {key} with other numbers than the first rank, or than before: make it from the "
            "same seed everywhere (torch.manual_seed)"
        )
    return _objects[key]


def pack() -> bytes | None:
    """Return all given objects as bytes for another process of the same program; None for a command line's.

    Classes and functions of a script or a notebook are sent as code, others by their names.

    Raises:
        UserError: If an object cannot be sent.
    """
    if _objects is None:
        return None
    import cloudpickle

    try:
        return cloudpickle.dumps(_objects)
    except (TypeError, pickle.PicklingError) as error:
        raise UserError(f"{' and '.join(_objects)} cannot be sent to the run's processes: {error}") from error


def unpack(packed: bytes | None) -> None:
    """Give this process what ``pack`` has returned."""
    if packed is not None:
        set_given(pickle.loads(packed))
