"""Objects that a Python program passes to ``training.train``. A configuration can only name them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from common.errors import UserError

GIVEN = "models.given.given"  # the _target_ of a section whose object is given

_objects: dict[str, Any] | None = None


def set_given(objects: Mapping[str, Any] | None) -> None:
    """Replace the objects given in this process, by key; None if no Python program runs the training."""
    global _objects
    _objects = None if objects is None else dict(objects)


def given_objects() -> dict[str, Any] | None:
    """Return the objects given in this process, by key; None if the command line started the run."""
    return _objects


def given(key: str, fingerprint: str = "", vocab_size: int | None = None) -> Any:
    """Return the model or the data that a Python program has given.

    Args:
        key: "model" or "data".
        fingerprint: The fingerprint of the object for which the configuration was made; "" to accept any object.
        vocab_size: The vocabulary size of a language model. It is an argument because the configuration contains it.

    Raises:
        UserError: If this process was not given the object, or was given another one.
    """
    if _objects is None or key not in _objects:
        raise UserError(f"{key} was given by a Python program: give it again, by training.train(..., {key}=...)")
    if fingerprint and fingerprint != getattr(_objects[key], "fingerprint", ""):
        raise UserError(
            f"this process was given a {key} with other numbers than the first rank, or than before: make it from the "
            "same seed everywhere (torch.manual_seed)"
        )
    return _objects[key]


def pack_given() -> bytes | None:
    """Return all given objects as bytes for another process of the same program; None if there is no program.

    Classes and functions of a script or a notebook are sent as code, all other objects by their names.

    Raises:
        UserError: If an object cannot be sent.
    """
    objects = given_objects()
    if objects is None:
        return None
    from models.module_pickling import dumps  # here, because it imports torch and cloudpickle

    try:
        return dumps(objects)
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise UserError(
            f"{' and '.join(objects)} cannot be sent to the run's processes: {error}. A model can be sent as a "
            "models.chain.Chain of functions that build its layers (docs/own_model.md, 'A model')"
        ) from error


def unpack_given(packed: bytes | None) -> None:
    """Give this process the objects that ``pack_given`` has packed."""
    if packed is not None:
        set_given(pickle.loads(packed))
