"""Pickling of objects, including modules with parametrizations, for another process of the same program."""

from __future__ import annotations

import copyreg
import io
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

# Dtypes whose tensors torch (2.13) pickles but cannot unpickle, besides the 8-bit floating-point dtypes.
_ONE_WAY = {torch.uint16, torch.uint32, torch.uint64, torch.complex32}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(cloudpickle.Pickler):
    """Also pickles modules of ``torch.nn.utils.parametrizations``, and tensors of all dtypes.

    torch forbids pickling these modules, because ``pickle`` would look up their classes by name, but registering a
    parametrization creates the class. cloudpickle sends these classes as code.
    """

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        if type(obj) is torch.Tensor and (obj.dtype in _ONE_WAY or obj.is_floating_point() and obj.itemsize == 1):
            return torch.Tensor.view, (obj.view(_SIGNED[obj.element_size()]), obj.dtype)
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), vars(obj)  # pyright: ignore[reportAttributeAccessIssue]
        return super().reducer_override(obj)


def dumps(objects: Any) -> bytes:
    """Return ``objects`` as bytes: classes and functions of a script or a notebook as code, all others by name."""
    file = io.BytesIO()
    _Pickler(file).dump(objects)
    return file.getvalue()
