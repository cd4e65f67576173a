"""A family's parameters under Hugging Face's names, and back.

What differs between the two is a table (``HuggingFace``), which reading and writing share: beginnings of names, and
matrices that the other keeps transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from models.config_json import Family, first_difference


@dataclass(frozen=True)
class HuggingFace:
    """How transformers keeps the models of a family.

    Attributes:
        family: What the keys of config.json mean.
        config: What of config.json follows from the sizes.
        names: {how a name begins here: how it begins there}; the first that fits counts.
        words: The parameters of which each row is a word.
        transposed: How the names of matrices end that are kept transposed there.
        redundant: {how names of tensors end that follow from the sizes, such as a causal mask: whether one does}.
        optional: How their names may begin or not: published files lack it.
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

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter ``name`` as Hugging Face keeps it, or theirs as this project keeps it."""
        return tensor.t().contiguous() if name.endswith(self.transposed) else tensor

    def difference(self, path: Path) -> str | None:
        """Return in which size the model is not what a config.json describes, and the cure; None: it is that.

        Raises:
            ModelError: config.json describes a model that this family does not have.
        """
        own = self.family.describe(self.config, f"model={self.family.name}")
        if (differs := first_difference(self.family.read(path), own)) is None:
            return None
        key, value, mine = differs
        says = f"{path} says {self.family.sizes.get(key, key)}={value}"
        return f"{says}, the model has {mine}; set model.{key}={value}"

    def export(self, state: Mapping[str, Tensor], words: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return Hugging Face's state dict, without a tied head, and the content of config.json.

        Rows from ``words`` on are padding of the vocabulary and left out; None: all rows are kept.
        """
        cut = {name: tensor[:words] if name in self.words else tensor for name, tensor in state.items()}
        converted = {self.their_name(name): self.convert(name, tensor) for name, tensor in cut.items()}
        kept = cut[self.words[0]]
        return converted, {**self.config, "vocab_size": len(kept), "dtype": str(kept.dtype).removeprefix("torch.")}
