"""The files of a model of transformers: the tensors of a folder that make a parameter, by the library's conversions.

A file may hold a parameter under another name (GPT-NeoX's ``embed_out``), or may hold separate matrices that the model
has in one parameter (the experts of a mixture). Models here may be on the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

# A function that opens a tensor of a file. The tensor has a shape, and its boxes are read by ``[...]``.
Opened = Callable[[], Any]
Parts = list[tuple[str, Opened]]  # tensors of a file, each with the pattern of a conversion that its name has matched


class Made:
    """A parameter that is made from tensors of a file. Reading a box of the parameter reads these tensors whole."""

    def __init__(self, shape: torch.Size, convert: Callable[..., dict[str, Tensor]], name: str) -> None:
        self.shape, self._convert, self._name = shape, convert, name

    def __getitem__(self, box: Any) -> Tensor:
        return self._convert(lambda tensor: tensor[...])[self._name][box]


def from_file(model: Any, opened: Mapping[str, Opened]) -> dict[str, Opened]:
    """Return {name in the model: tensor} from {name in the file: tensor}, without tensors that are never read."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    known = model.state_dict()
    found = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in found if isinstance(each, loading.WeightRenaming)]
    conversions = [each for each in found if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    # Buffers that older files contain.
    unread = {r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())}
    given: dict[str, Opened] = {}
    parts: dict[str, Parts] = {}  # for the parameters made from several tensors, by the name of the first tensor
    for key in sorted(opened, key=loading.dot_natural_key):  # expert 2 before expert 10
        name, pattern = loading.rename_source_key(key, renamings, conversions, model.base_model_prefix, known)
        if pattern is not None:
            parts.setdefault(name, []).append((pattern, opened[key]))
        elif name in known or not any(re.search(each, name) for each in unread):
            given[name] = opened[key]
    for first, several in parts.items():
        convert = partial(_convert, model, by_pattern[several[0][0]], first, several)
        for name, like in convert(lambda tensor: torch.empty(tensor.shape, device="meta")).items():
            given[name] = partial(Made, like.shape, convert, name)
    return given


def _convert(
    model: Any, conversion: Any, first: str, parts: Parts, value: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Return the parameters, by name, that a conversion makes from the ``value`` of each part."""
    conversion = copy.deepcopy(conversion)  # it accumulates tensors
    for pattern, opened in parts:
        conversion.add_tensor(first, pattern, pattern, lambda opened=opened: value(opened()))
    return conversion.convert(first, model=model, config=model.config)
