"""Any causal language model of transformers as a chain, computed by the model's own code.

A stage computes its layers with what the model's ``forward`` gives them: masks, rotary positions, window sizes. None of
it is written down here. The model is built once on the meta device, and its ``forward`` runs with stand-ins::

    embedding        layers.0 ... layers.N-1               head
    what is called   the layers that the pipeline plan     what is called after
    before them      of the configuration names            them, and the projection

``Embedding`` and ``Head`` run the model's ``forward`` with their own modules and stop it at the first layer, or enter
it after the last one. A layer is called with the arguments that ``forward`` would call it with (``Calls``), which
depend on shapes only; hidden states alone pass from layer to layer. ``prove`` compares all of this with the whole
model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from common.errors import ModelError

_TOKENS = 12  # of each of two texts, which ``prove`` computes


class Decoder:
    """A causal language model of transformers on the meta device, and the places of its layers in it.

    Attributes:
        model: The model, without numbers.
        layers: The name of the list of layers in it.
        before: The names of the modules that are called before the first layer.
        after: The names of those that are called after the last one.
    """

    def __init__(self, config: Any) -> None:
        """Build the model that a configuration of transformers describes.

        Raises:
            ModelError: It is no causal language model whose layers follow one another.
        """
        from transformers import AutoModelForCausalLM

        self.kind = config.model_type
        try:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        except Exception as error:  # each of them checks its configuration in its own way
            raise ModelError(f"model={self.kind}: transformers cannot build it: {error}") from None
        self.model.config.use_cache = False
        self.layers = self._find_layers()
        self.before, self.after, self.outputs = self._find_order()

    def __deepcopy__(self, memo: dict) -> Decoder:
        return self

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, without numbers."""
        return self.model.get_submodule(self.layers)

    def _find_layers(self) -> str:
        base, prefix = self.model.base_model, f"{self.model.base_model_prefix}."
        depth = self.model.config.get_text_config().num_hidden_layers
        lists = {
            name: module for name, module in base.named_modules() if isinstance(module, nn.ModuleList) and len(module)
        }
        planned = [name for name in (base.config.base_model_pp_plan or {}) if name in lists]
        named = planned or [name for name, module in lists.items() if len(module) == depth and not _inside(name, lists)]
        if base is self.model or len(named) != 1:
            raise ModelError(
                f"{type(self.model).__name__} does not say where its {depth} layers are: lists of modules are "
                f"{', '.join(lists) or 'missing'}"
            )
        return prefix + named[0]

    def units(self) -> dict[str, nn.Module]:
        """Return the modules beside the list of layers, and beside each module that contains it, by name."""
        spine = [self.layers.rsplit(".", depth)[0] for depth in range(1, self.layers.count(".") + 1)] + [""]
        units = {}
        for name in spine:
            module = self.model.get_submodule(name)
            if own := dict(module.named_parameters(recurse=False)):
                raise ModelError(f"{type(module).__name__} has the parameters {', '.join(own)} itself, in no layer")
            for key, child in module.named_children():
                path = f"{name}.{key}" if name else key
                if path != self.layers and path not in spine:
                    units[path] = child
        return units

    def _find_order(self) -> tuple[list[str], list[str], int]:
        """Return the names of the modules before the first layer and after the last one, and a layer's outputs."""
        called: list[str] = []
        outputs: list[int] = []
        hooks = [
            inner.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for name, unit in self.units().items()
            for inner in unit.modules()
        ]
        for block in self.blocks:
            hooks.append(block.register_forward_pre_hook(lambda *_: called.append("")))
            hooks.append(block.register_forward_hook(lambda _m, _i, out: outputs.append(_length(out))))
        try:
            with torch.no_grad():
                tokens = torch.zeros(2, 4, dtype=torch.long, device="meta")
                self.model(input_ids=tokens, attention_mask=_seen(tokens), use_cache=False)
        except Exception as error:
            raise ModelError(f"{type(self.model).__name__} computes no text of 4 tokens: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        first = called.index("")
        last = len(called) - called[::-1].index("")
        before = set(called[:first])
        for name in sorted(before & set(called[first:])):
            if any(True for _ in self.model.get_submodule(name).parameters()):
                raise ModelError(f"{type(self.model).__name__} computes with {name} before its layers and after them")
        after = set(called[last:]) | (set(self.units()) - set(called))
        return sorted(before), sorted(after), outputs[0]

    # -- names ---------------------------------------------------------------------------------------------------------

    def layer_of(self, name: str) -> str:
        """Return the name in the chain of a parameter, or a module, of the model."""
        if name.startswith(f"{self.layers}."):
            return "layers." + name.removeprefix(f"{self.layers}.")
        owner = "embedding" if any(name == unit or name.startswith(f"{unit}.") for unit in self.before) else "head"
        return f"{owner}.{name}"

    @property
    def names(self) -> dict[str, str]:
        """{the beginning of a name in the chain: its beginning in the model}."""
        return {"layers.": f"{self.layers}.", "embedding.": "", "head.": ""}

    @property
    def tied(self) -> dict[str, str]:
        """{alias: canonical} names in the chain of parameters that are one parameter of the model."""
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner != name:
                tied[self.layer_of(name)] = self.layer_of(owner)
        return tied


def _inside(name: str, lists: Mapping[str, nn.Module]) -> bool:
    """Return whether a list of modules is in one of the others."""
    return any(name.startswith(f"{other}.") for other in lists)


def _length(output: Any) -> int:
    """Return how many things a layer returns; 0 for a tensor."""
    return len(output) if isinstance(output, (tuple, list)) else 0


def _seen(x: Tensor) -> Tensor:
    """Return a mask [b, 1, t, t] that the model takes as it is. Making its own it would look at numbers."""
    return x.new_zeros((), dtype=torch.bool).expand(len(x), 1, x.shape[1], x.shape[1])
