"""Packages that need help to be imported, or that a user may not have."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from common.errors import UserError

log = logging.getLogger("training")

_declared: list = []  # kept, because declarations end when their Library is deleted


def load_torchvision() -> ModuleType:
    """Return torchvision, even if its compiled extension does not fit the installed torch.

    The wheel on the package index is built against CUDA torch. With a CPU torch the extension cannot be loaded, and
    ``import torchvision`` fails with ``operator torchvision::nms does not exist``, although models, datasets and
    transforms are pure Python. In this case, the function declares the two operators that the Python code refers to,
    imports torchvision again and logs a warning. Compiled operators are not available then.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    import torch

    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]  # the half-imported package
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    torchvision = importlib.import_module("torchvision")
    log.warning(
        "torchvision %s does not fit torch %s and is used without its compiled operators. Install both from one index: "
        "https://download.pytorch.org/whl/",
        torchvision.__version__,
        torch.__version__,
    )
    return torchvision


def load_transformers() -> ModuleType:
    """Return transformers, also where torchvision, which it imports, does not fit torch. Raises UserError."""
    return _load_beside_torchvision("transformers", "'transformers>=5.20,<6'")


def load_torchmetrics() -> ModuleType:
    """Return torchmetrics, also where torchvision, which it imports, does not fit torch. Raises UserError."""
    return _load_beside_torchvision("torchmetrics", "torchmetrics")


def _load_beside_torchvision(package: str, to_install: str) -> ModuleType:
    with suppress(ImportError):
        load_torchvision()
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"the package {package} is needed: pip install {to_install}") from None


def package_file(package: str, path: str) -> Path | None:
    """Return a file of an installed package, which is not imported; None if there is no such package or file."""
    spec = importlib.util.find_spec(package)
    paths = [Path(folder, path) for folder in (spec and spec.submodule_search_locations) or ()]
    return next(filter(Path.is_file, paths), None)
