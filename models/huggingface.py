"""A family's parameters under Hugging Face's names, and back.

Reading and writing use the same table of differences (``HuggingFace``): the beginnings of names, and matrices that
Hugging Face stores transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from models.config_json import Family


@dataclass(frozen=True)
class HuggingFace:
    """How transformers stores the models of a family.

    Attributes:
        family: The meaning of the keys of config.json.
        config: The content of config.json that follows from the sizes.
        names: {the beginning of a name here: its beginning there}; the first that matches is used.
        words: The parameters in which each row is a word.
        transposed: The ends of the names of matrices that are stored transposed there.
        redundant: {the end of the name of a tensor that follows from the sizes, such as a causal mask: its check}.
        optional: A beginning of names that published files may lack.
    """

    family: Family
    config: Mapping[str, Any]
    names: Mapping[str, str]
    words: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    redundant: Mapping[str, Callable[[Tensor], bool]] = field(default_factory=dict)
    optional: str = ""

    def their_name(self, name: str) -> str:
        """Return Hugging Face's name of the parameter ``name``."""
        begins, theirs = next(pair for pair in self.names.items() if name.startswith(pair[0]))
        return theirs + name.removeprefix(begins)

    def read(self, opened: Mapping[str, Callable[[], Any]]) -> Mapping[str, Callable[[], Any]]:
        """Return {name: tensor, opened when it is called} of a model of transformers, from those of its files."""
        return opened

    def difference(self, path: Path) -> str | None:
        """Return a message about the first size in which the model differs from a config.json; None if it does not.

        Raises:
            ModelError: If config.json describes a model that this family does not have.
        """
        sizes = self.family.describe(self.config, f"model={self.family.name}")
        for key, value in self.family.read(path).items():
            if sizes[key] != value and not (key == "vocab_size" and sizes[key] > value):
                says = f"{path} says {self.family.sizes.get(key, key)}={value}"
                return f"{says}, the model has {sizes[key]}; leave model.size and model.{key} out"
        return None

    def export(self, state: Mapping[str, Tensor], words: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return Hugging Face's state dict, without a tied head, and the content of config.json.

        Rows from ``words`` on are padding of the vocabulary and are left out; None keeps all rows.
        """
        tensors = {}
        for name, tensor in state.items():
            kept = tensor[:words] if name in self.words else tensor
            tensors[self.their_name(name)] = kept.t().contiguous() if name.endswith(self.transposed) else kept
        embedding = tensors[self.their_name(self.words[0])]
        dtype = str(embedding.dtype).removeprefix("torch.")
        return tensors, {**self.config, "vocab_size": len(embedding), "dtype": dtype}
