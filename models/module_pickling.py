"""Objects as bytes for another process of the same program, modules with parametrizations included."""

from __future__ import annotations

import copyreg
import io
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized


class _Pickler(cloudpickle.Pickler):
    """Also takes modules of ``torch.nn.utils.parametrizations``.

    torch forbids to pickle them, because ``pickle`` would look for their classes, which are made when a parametrization
    is registered. cloudpickle sends such classes as code.
    """

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), vars(obj)  # pyright: ignore[reportAttributeAccessIssue]
        return super().reducer_override(obj)


def dumps(objects: Any) -> bytes:
    """Return ``objects`` as bytes. Classes and functions of a script or a notebook are sent as code, others by name."""
    file = io.BytesIO()
    _Pickler(file).dump(objects)
    return file.getvalue()
