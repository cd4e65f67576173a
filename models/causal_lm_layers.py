"""The layers of a causal language model of transformers, each computed through the model's own ``forward``.

``Forward`` finds the layers of a model, and the modules that the model calls before and after them. A model on the meta
device runs with stand-ins for the modules that another layer of the chain holds::

    embedding           layers.0 ... layers.N-1           head
    modules called      the list of layers                modules called
    before the layers                                     after the layers

``Embedding`` leaves the model's ``forward`` at its first layer, and ``Head`` enters it after the last layer. A layer
gets the arguments that ``forward`` would pass: masks, rotary positions, windows. These arguments depend on shapes only,
so the layers pass only hidden states to each other.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from common.errors import ModelError, brief
from common.packages import load_transformers
from models import sequence
from models.causal_lm_attention import cut, masks_of_layers
from models.causal_lm_balance import Balance
from models.chain import CPU, nest, own_tensors, without_weights
from models.fused_cross_entropy import FusedHead
from models.seeds import seeded
from models.sequence import SequencePart

_KEPT = 16  # number of shapes of hidden states for which the arguments of layers are kept


def uncompiled(function: Any) -> Any:
    """Exclude a function from torch.compile."""
    return torch.compiler.disable(function)


class Reached(Exception):  # noqa: N818  # not an error: it leaves a model's forward
    """Raised when the input of a module has been computed."""


class StandIn(nn.Module):
    """A stand-in for a module that another layer of the chain holds, with the attributes of that module.

    Attributes:
        stops: Whether the model's ``forward`` ends with the input of this module, at the call of the module.
        outputs: The number of items in the tuple that a layer returns, 0 if it returns a tensor; None if it is not a
            layer.
        received: The output of a layer that is computed elsewhere, if it is known.
        seen: (arguments after the hidden states, keyword arguments) of the last call.
    """

    def __init__(self, module: nn.Module, outputs: int | None = None, stops: bool = False) -> None:
        super().__init__()
        self.of = lambda: module  # the module stays on the meta device, is no submodule, and is never copied
        self.outputs, self.stops = outputs, stops
        self.received: Tensor | None = None
        self.seen: tuple[tuple, dict] = (), {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.of(), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a layer's received output, or else its input; for other modules, zeros in place of the output."""
        self.seen = args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}
        if self.stops:
            raise Reached(hidden_of(args, kwargs))
        if self.outputs is None:
            given = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
            kind = given.dtype if given.is_floating_point() else torch.get_default_dtype()
            args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
            zeros = partial(torch.zeros, dtype=kind, device=given.device)
            return tree_map_only(Tensor, lambda t: zeros(t.shape), self.of()(*args, **kwargs))
        hidden = hidden_of(args, kwargs) if self.received is None else self.received
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden


@contextmanager
def refused(kind: str, why: str) -> Iterator[None]:
    """Raise ModelError for an error in the block. The block runs a part of a model's own code."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{kind} cannot be cut into layers: {why} ({brief(error)})") from error


class Forward:
    """The ``forward`` of a causal language model. Each layer of the chain computes one part of it.

    Attributes:
        model: The model on the meta device.
        kind: The name of the model's class.
        layers: The name of the model's list of layers.
        units: The modules beside the list of layers, and beside each module that contains the list, by name.
        before: The names of the units that ``forward`` calls before the layers.
        twice: The names of the units that ``forward`` calls both before and after the layers. They have no parameters.
        projection: The name of the projection onto the vocabulary.
        outputs: The number of items in the tuple that a layer returns; 0 if it returns a tensor.
        plain: Whether the projection's outputs are the logits. If not, the model scales or caps them.
        balance: The loss of the routers that the model adds to the loss of the logits; None if it adds none.
    """

    balance: Balance | None = None
    _newest: tuple = (None, None, [])  # documents, their shape, and the arguments of layers for them

    def __init__(self, model: Any) -> None:
        """Find the parts of a model. Raises ModelError if its layers do not follow one another."""
        self.model, self.kind = model, type(model).__name__
        with refused(self.kind, "its own code does not run without the layers"), torch.no_grad():
            self.layers = self._find_layers()
            self.blocks: Any = model.get_submodule(self.layers)
            self.units = self._find_units()
            self.before, self.twice, self.outputs = self._find_order()
            self.projection = self.name_of(model.get_output_embeddings())
            self.plain = self.projection in self.units and self._returns_logits()

    def _find_layers(self) -> str:
        base, depth = self.model.base_model, self.model.config.get_text_config().num_hidden_layers
        lists = {name: part for name, part in base.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
        planned = [name for name in (base.config.base_model_pp_plan or {}) if name in lists]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        named = planned or [name for name in outer if len(lists[name]) == depth]
        if base is self.model or len(named) != 1:
            named = ", ".join(lists) or "it has none"
            raise ModelError(f"{self.kind} does not say which of its lists of modules are its {depth} layers: {named}")
        return f"{self.model.base_model_prefix}.{named[0]}"

    def _find_units(self) -> dict[str, nn.Module]:
        """Return the modules beside the list of layers, and beside each module that contains the list, by name."""
        parts = self.layers.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts))]
        units = {}
        for name in above:
            module = self.model.get_submodule(name)
            if own := dict(module.named_parameters(recurse=False)):
                raise ModelError(f"{self.kind} has parameters outside of its modules: {', '.join(own)}")
            if dropped := getattr(module, "layerdrop", 0):
                said = f"{self.kind} leaves out layers at random (layerdrop={dropped})"
                raise ModelError(f"{said}, and a chain computes all of them; set +model.settings.layerdrop=0")
            children = {f"{name}.{key}".lstrip("."): child for key, child in module.named_children()}
            units |= {path: child for path, child in children.items() if path not in (*above, self.layers)}
        return units

    def _find_order(self) -> tuple[list[str], list[str], int]:
        """Return the values of ``before``, ``twice`` and ``outputs``."""
        called: list[str | None] = []  # None stands for a layer
        outputs: list[Any] = []
        hooks = [
            inner.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for name, unit in self.units.items()
            for inner in unit.modules()
        ]
        hooks += [block.register_forward_pre_hook(lambda *_: called.append(None)) for block in self.blocks]
        hooks += [block.register_forward_hook(lambda *given: outputs.append(given[-1])) for block in self.blocks]
        tokens = torch.zeros(2, 4, dtype=torch.long, device="meta")
        with refused(self.kind, "it does not compute a text without looking at numbers"):
            self.model(input_ids=tokens, attention_mask=all_seen(tokens), use_cache=False)
        for hook in hooks:
            hook.remove()
        if called.count(None) != len(self.blocks):
            raise ModelError(f"{self.kind} calls its {len(self.blocks)} layers {called.count(None)} times")
        before, after = called[: called.index(None)], called[-called[::-1].index(None) or len(called) :]
        twice = [name for name in self.units if name in before and name in after]
        for name in twice:
            if any(True for _ in self.units[name].parameters()):
                raise ModelError(f"{self.kind} cannot be cut into layers: it calls {name} before them and after them")
        count = 0 if isinstance(outputs[0], Tensor) else len(outputs[0])
        return [name for name in self.units if name in before], twice, count

    def _returns_logits(self) -> bool:
        given = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
        projection = StandIn(nn.Identity(), outputs=0)
        projection.received = given
        shell = self.shell({self.projection: projection})
        hidden = torch.zeros(1, 2, self.model.config.get_text_config().hidden_size)
        logits = shell(inputs_embeds=hidden, attention_mask=all_seen(hidden), use_cache=False).logits
        return torch.equal(logits, given)

    def name_of(self, module: nn.Module) -> str:
        """Return the model's name for one of its modules."""
        return next(name for name, part in self.model.named_modules() if part is module)

    def __deepcopy__(self, memo: dict) -> Forward:
        return self

    def shell(self, units: Mapping[str, nn.Module], stops: bool = False) -> Any:
        """Return a copy of the model with the given units, and with stand-ins for all other units and the layers.

        With ``stops`` its ``forward`` ends at the first layer.
        """
        layers = nn.ModuleList(StandIn(block, self.outputs, stops) for block in self.blocks)
        memo: dict[int, Any] = {id(self.blocks): layers}
        for name, unit in self.units.items():
            memo |= {id(unit): units[name]} if name in units else {id(part): StandIn(part) for part in _called(unit)}
        return copy.deepcopy(self.model, memo | {id(self.model.config): self.model.config})

    @uncompiled
    def _with_others(self, index: int, layer: Any, given: tuple[Tensor], _: dict) -> tuple[tuple, dict]:
        """Return all arguments of layer number ``index``, which the chain calls with hidden states [b, t, c] only."""
        (hidden,) = given
        if any(isinstance(size, torch.SymInt) for size in hidden.shape):
            raise ModelError(
                f"the layers of {self.kind} get masks and positions that are made for each length of a text, and a "
                "program is for all lengths; use export.format=safetensors, a folder that transformers reads"
            )
        shape = len(hidden), hidden.shape[1] * layer.parts, hidden.shape[2]
        if (documents := sequence.documents()) is not None:
            args, kwargs = self._calls_for(documents, hidden, shape)[index]
        elif type(hidden) in (Tensor, nn.Parameter):
            args, kwargs = self._calls_on(hidden.device, shape, hidden.dtype, sequence.part())[index]
        else:  # a tensor without numbers has a device, too; the mode that made it moves the arguments there
            args, kwargs = _moved(self._calls_on(CPU, shape, hidden.dtype, sequence.part())[index], hidden.device)
        return (hidden, *args), kwargs

    @lru_cache(_KEPT)  # noqa: B019  # a process has few models
    def _calls_on(
        self, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, part: SequencePart | None
    ) -> list[tuple[tuple, dict]]:
        if device != CPU:
            return _moved(self._calls_on(CPU, shape, dtype, part), device)
        compute = partial(self._called_with, shape, dtype)
        if part is not None:
            compute = partial(self._called_with_part, shape, dtype, part)
        with ThreadPoolExecutor(1) as thread:  # so that modes that compute without numbers do not reach it
            return thread.submit(compute).result()

    @cached_property
    def _caller(self) -> Any:
        """The model for calls of its layers, without parameters."""
        free = [name for name in self.before if not any(True for _ in self.units[name].parameters())]
        units = {name: without_weights(self.units[name]) for name in free}
        for unit in units:
            for name, module in units[unit].named_modules(prefix=unit):
                self.set_numbers(name, module)  # its buffers
        return self.shell(units)

    def _called_with_part(self, shape: tuple[int, ...], dtype: torch.dtype, part: SequencePart) -> Any:
        calls, longer = self._two_lengths(CPU, (shape[0], part.length, shape[2]), dtype, False)
        return cut(calls, longer, part.positions.to(CPU))

    @lru_cache(_KEPT)  # noqa: B019  # a process has few models
    def _two_lengths(self, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, in_memory: bool) -> Any:
        """Return the arguments of layers for sequences of this length, and of one more."""
        b, length, c = shape
        with masks_of_layers(in_memory):
            return [_moved(self._called_with((b, each, c), dtype), device) for each in (length, length + 1)]

    def _calls_for(self, documents: Tensor, hidden: Tensor, shape: tuple[int, ...]) -> list[tuple[tuple, dict]]:
        """Return the arguments of layers for some documents. The newest are kept, because all layers need them."""
        part, key = sequence.part(), (shape, hidden.dtype)
        if self._newest[0] is not documents or self._newest[1] != key:
            whole = shape if part is None else (shape[0], part.length, shape[2])
            calls, longer = self._two_lengths(hidden.device, whole, hidden.dtype, part is None)
            positions = sequence.positions(shape[1], hidden.device)
            self._newest = documents, key, cut(calls, longer, positions, documents if part is None else None)
        return self._newest[2]

    def _called_with(self, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[tuple, dict]]:
        with sequence.computing_part(None), sequence.computing_documents(None), torch.no_grad():
            self._caller.base_model(inputs_embeds=torch.zeros(shape, dtype=dtype), use_cache=False)
        return [layer.seen for layer in self._caller.get_submodule(self.layers)]

    def set_numbers(self, path: str, module: nn.Module) -> None:
        """Initialize a module's own tensors as the model does. If the model does not, use the module's constructor."""
        own = {key: tensor for key, tensor in own_tensors(module).items() if tensor.numel() and not tensor.is_meta}
        with torch.no_grad():
            for tensor in own.values():
                if tensor.is_floating_point():
                    tensor[(0,) * tensor.dim()] = torch.nan
            versions = {key: tensor._version for key, tensor in own.items()}
            self.model._init_weights(module)
            for key, tensor in own.items():
                first = tensor[(0,) * tensor.dim()]
                if first.isnan() if tensor.is_floating_point() else tensor._version == versions[key]:
                    tensor.copy_(getattr(self._constructed.get_submodule(path), key))

    @cached_property
    def _constructed(self) -> Any:
        """The model after construction, without initial weights. It uses no memory for them."""
        from transformers.initialization import no_init_weights

        auto = load_transformers().AutoModelForCausalLM
        with seeded(0), torch.device("cpu"), no_init_weights():
            return auto.from_config(self.model.config, dtype=torch.float32)

    # -- layers of the chain, with the modules that ``part`` returns by name -------------------------------------------

    def embedding(self, part: Callable[[str], nn.Module]) -> nn.Module:
        """Return the first layer, token ids [b, t] -> [b, t, c]."""
        units = {name: part(name) for name in self.before}
        return Embedding(self, units, self.shell(units, stops=True))

    def layer(self, part: Callable[[str], nn.Module], index: int) -> nn.Module:
        """Return a layer that is called with hidden states only, [b, t, c] -> same.

        The attribute ``parts`` is the number of parts of the sequence. Hidden states are one part
        (``parallel.sequence``).
        """
        layer = part(f"{self.layers}.{index}")
        layer.parts = 1  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
        layer.register_forward_pre_hook(partial(self._with_others, index), with_kwargs=True)
        layer.register_forward_hook(lambda _layer, _given, output: first_of(output))
        if self.balance is not None:
            self.balance.watch(layer)
        return layer

    def head(self, part: Callable[[str], nn.Module]) -> nn.Module:
        """Return the last layer, [b, t, c] -> logits [b, t, v]."""
        units = {name: part(name) for name in self.units if name not in self.before or name in self.twice}
        if not self.plain:
            return Head(self, units, self.shell(units))
        projection = StandIn(units[self.projection], stops=True)
        return PlainHead(self, units, self.shell({**units, self.projection: projection}))


class Part(nn.Module):
    """Some modules of a model. They compute in ``shell``, a copy of the model with stand-ins for all other modules."""

    whole: Forward
    shell: Any

    def __init__(self, whole: Forward, units: Mapping[str, nn.Module], shell: Any) -> None:
        super().__init__()
        for name, unit in units.items():
            nest(self, name, unit)
        self.__dict__.update(whole=whole, shell=shell)  # no submodule
        self.train()

    def run(self, **inputs: Tensor) -> Tensor:
        """Return the logits of the shell, or the input of the module at which it stops."""
        if self.shell.training != self.training:  # the model has dropout between its modules
            self.shell.train(self.training)
        try:
            return self.shell(**inputs, attention_mask=all_seen(next(iter(inputs.values()))), use_cache=False).logits
        except Reached as reached:
            return reached.args[0]


class Embedding(Part):
    """The part of a model before its layers, token ids [b, t] -> [b, t, c]."""

    @uncompiled
    def forward(self, tokens: Tensor) -> Tensor:
        """[b, t] -> [b, t, c]."""
        more = {}
        apart = sequence.part() is not None or sequence.documents() is not None
        if apart and "position_ids" in inspect.signature(self.shell.forward).parameters:
            positions = sequence.positions(tokens.shape[1], tokens.device)
            more["position_ids"] = positions.view(-1, tokens.shape[1])
        return self.run(input_ids=tokens, **more)


class Head(Part):
    """The part of a model after its layers, [b, t, c] -> logits [b, t, v]."""

    @uncompiled
    def hidden(self, x: Tensor) -> Tensor:
        """Compute the part after the layers, [b, t, c] -> logits, or the input of the module at which it stops."""
        last = self.shell.get_submodule(self.whole.layers)[-1]
        last.received = x
        try:
            return self.run(inputs_embeds=x.detach())
        finally:
            last.received = None

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, c] -> [b, t, v]."""
        return self.hidden(x)


class PlainHead(Head, FusedHead):
    """A head that ends with its projection, so that the loss can be computed without logits."""

    forward = FusedHead.forward  # pyright: ignore[reportAssignmentType]

    @property
    def projection(self) -> nn.Linear:
        """The projection onto the vocabulary, which may be tied to the embedding."""
        return self.get_submodule(self.whole.projection)  # pyright: ignore[reportReturnType]


def first_of(output: Any) -> Tensor:
    """Return the hidden states from the output of a layer."""
    return output if isinstance(output, Tensor) else output[0]


def hidden_of(args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states from the arguments of a layer."""
    return args[0] if args else kwargs["hidden_states"]


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the modules that are called: the module itself, or its children if it is only a list of modules."""
    listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return [part for child in module.children() for part in _called(child)] if listed else [module]


def _moved(calls: Any, device: torch.device) -> Any:
    def moved(tensor: Tensor) -> Tensor:
        copied = tensor if tensor.is_meta else tensor.to(device)  # a mask that takes no memory
        vars(copied).update(vars(tensor))  # what ``cut`` knows of a mask
        return copied

    return tree_map_only(Tensor, moved, calls)


def _on_meta(tensor: Tensor) -> Tensor:
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="meta")


def all_seen(x: Tensor) -> Tensor:
    """Return a mask [b, 1, t, t] that a model uses unchanged. A mask of its own would require reading numbers."""
    return x.new_zeros((), dtype=torch.bool).expand(len(x), 1, x.shape[1], x.shape[1])
