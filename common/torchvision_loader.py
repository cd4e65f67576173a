"""Imports torchvision also where its compiled extension does not fit the installed torch.

The wheel on the package index is built against CUDA torch. With a CPU torch the extension cannot load, and
``import torchvision`` fails in ``operator torchvision::nms does not exist`` although models, datasets and
transforms are pure Python. Declaring the two operators that its Python code registers against makes the import work.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

log = logging.getLogger("training")

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list = []  # declarations end when their Library is deleted


def load_torchvision() -> ModuleType:
    """Return torchvision. Nothing is declared where torch and torchvision fit each other."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    import torch

    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]  # the half-imported package
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    torchvision = importlib.import_module("torchvision")
    log.warning(
        "torchvision %s does not fit torch %s: its compiled operators cannot be loaded, and it is used without them. "
        "Install both from one index, such as: pip install --force-reinstall torch torchvision --index-url "
        "https://download.pytorch.org/whl/%s",
        torchvision.__version__.partition("+")[0],
        torch.__version__,
        f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu",
    )
    return torchvision
