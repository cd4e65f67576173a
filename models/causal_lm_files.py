"""The files of a model of transformers: which tensors of a folder make a parameter, by the library's own conversions.

A file may hold a parameter under another name (GPT-NeoX's ``embed_out``), or the matrices apart that the model has in
one parameter (the experts of a mixture).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

# A tensor of a file, opened when it is called: with a shape, and boxes that are read by ``[...]``.
Opened = Callable[[], Any]


class Made:
    """A parameter that is made of tensors of a file. They are read whole when a box of it is."""

    def __init__(self, shape: torch.Size, make: Callable[[], Tensor]) -> None:
        self.shape, self._make = shape, make

    def __getitem__(self, box: Any) -> Tensor:
        return self._make()[box]


class Group:
    """The tensors of a file of which a conversion of transformers makes one parameter, or several."""

    def __init__(self, model: Any, first: str, conversion: Any) -> None:
        """Begin without tensors. ``first`` is the name of the first parameter."""
        self._model, self._first, self._conversion = model, first, conversion
        self._parts: list[tuple[str, Opened]] = []

    def add(self, pattern: str, tensor: Opened) -> None:
        """Add a tensor whose name has matched this pattern of the conversion."""
        self._parts.append((pattern, tensor))

    def parameters(self) -> dict[str, Opened]:
        """Return the parameters by name."""
        shapes = self._convert(lambda tensor: torch.empty(tensor.shape, device="meta"))
        return {name: partial(Made, like.shape, partial(self._read, name)) for name, like in shapes.items()}

    def _read(self, name: str) -> Tensor:
        return self._convert(lambda tensor: tensor[...])[name]

    def _convert(self, value: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        conversion = copy.deepcopy(self._conversion)  # it collects
        for pattern, tensor in self._parts:
            conversion.add_tensor(self._first, pattern, pattern, lambda tensor=tensor: value(tensor()))
        return conversion.convert(self._first, model=self._model, config=self._model.config)


class Conversions:
    """What transformers does with the tensors of a folder when it reads and writes a model."""

    def __init__(self, model: Any) -> None:
        """Take the conversions of a model, which may be on the meta device."""
        self._model = model

    def read(self, opened: Mapping[str, Opened]) -> dict[str, Opened]:
        """Return {name in the model: tensor} from {name in the file: tensor}, without those that it leaves unread."""
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        model, known = self._model, self._model.state_dict()
        found = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [one for one in found if isinstance(one, loading.WeightRenaming)]
        conversions = [one for one in found if isinstance(one, loading.WeightConverter)]
        by_pattern = {pattern: one for one in conversions for pattern in one.source_patterns}
        given: dict[str, Opened] = {}
        groups: dict[str, Group] = {}
        for key in sorted(opened, key=loading.dot_natural_key):  # expert 2 before expert 10
            name, pattern = loading.rename_source_key(key, renamings, conversions, model.base_model_prefix, known)
            if pattern is not None:
                groups.setdefault(name, Group(model, name, by_pattern[pattern])).add(pattern, opened[key])
            elif name in known or not self._unread(name):
                given[name] = opened[key]
        for group in groups.values():
            given |= group.parameters()
        return given

    def write(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {name in the file: tensor} from {name in the model: tensor}."""
        from transformers import core_model_loading as loading

        return loading.revert_weight_conversion(self._model, dict(state))

    def _unread(self, name: str) -> bool:
        """Return whether it is a buffer that older files hold and that the library leaves unread."""
        patterns = {r"rotary_emb\.inv_freq", *(self._model._keys_to_ignore_on_load_unexpected or ())}
        return any(re.search(pattern, name) for pattern in patterns)
