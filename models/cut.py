r"""The division of a model's layers among ranks (tensor parallelism), as a table of module names: ``Chain.cut``.

A region of a layer begins with products that are cut by ``Columns`` and ends with a product that is cut by ``Rows``::

    x whole --> columns of rank 0 --> ... --> rows of rank 0 --+
            \-> columns of rank 1 --> ... --> rows of rank 1 --+--> sum, whole

Between these products, a rank computes with a part of the layer's columns (heads), and must not mix them. A model only
provides this table; ``parallel.axes.tensor`` does the rest::

    cut = {
        "h.*.attn.c_attn": Columns(groups=3, unit=64),  # queries, keys and values side by side, heads of 64
        "h.*.attn.c_proj": Rows(),
        "h.*.mlp.c_fc": Columns(),
        "h.*.mlp.c_proj": Rows(),
        "embedding.wte": Vocabulary(),
        "head.lm_head": Vocabulary(),
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from common.errors import ModelError, PlanError
from models.fused_cross_entropy import FusedHead
from models.losses import loss_of


@dataclass(frozen=True)
class Columns:
    """Divides a module's outputs. The module's own parameters are cut along their first dimension, not its submodules'.

    Attributes:
        groups: The number of equal matrices that lie side by side in the module. Each matrix is cut separately.
        unit: The number of neighboring outputs that stay together: the width of a head.
        shared: Whether several query heads use each head, as for keys and values. If there are fewer heads than ranks,
            each rank computes all heads and uses one.
    """

    groups: int = 1
    unit: int = 1
    shared: bool = False

    def heads(self, module: nn.Module) -> int:
        """Return the number of heads, or single outputs, in each of the matrices of a whole module."""
        return next(module.parameters(recurse=False)).shape[0] // (self.groups * self.unit)


@dataclass(frozen=True)
class Rows:
    """Divides the inputs of an ``nn.Linear``, which ``Columns`` has divided. The results of the ranks are summed."""


@dataclass(frozen=True)
class Vocabulary:
    """Divides the words of a token embedding, or of the projection in a ``FusedHead``."""


@dataclass(frozen=True)
class Experts:
    """Divides the experts of a module among replicas (``parallel.ep``), not among the ranks of ``parallel.tp``.

    Every parameter of the module is a stack with one row per expert, [experts, ...]. The module has no buffers and no
    dropout. ``forward(x, chosen, weights)`` takes tokens [n, c], the numbers of each token's experts [n, k] and their
    weights [n, k]. It returns the sum over a token's experts of weight x output, [n, c]. It may get any number of
    tokens, also none. It reads the number of experts from its parameters or its attribute ``num_experts``.
    """

    def count(self, module: nn.Module) -> int:
        """Return the number of experts of a module."""
        return next(module.parameters()).shape[0]


@dataclass(frozen=True)
class Refused:
    """A module that cannot be divided.

    Attributes:
        reason: The reason, for the error message.
    """

    reason: str


@dataclass(frozen=True)
class GatherInput:
    """Gathers the module's input once, instead of the input of each ``Columns()`` module inside it.

    With ``parallel.sequence`` the module infers the shapes of its columns' outputs from its input, which must be whole.
    """


CutOf = Columns | Rows | Vocabulary | GatherInput | Experts | Refused


def cut_of(table: Mapping[str, CutOf], module: str) -> CutOf | None:
    """Return the cut of a module, by its name in the chain; None if it is not cut."""
    return next((cut for pattern, cut in table.items() if fnmatchcase(module, pattern)), None)


def experts_of(table: Mapping[str, CutOf], layers: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules inside ``layers``, by name, whose experts can be divided. Names start with ``prefix``."""
    named = layers.named_modules(prefix=prefix)
    return {name: module for name, module in named if isinstance(cut_of(table, name), Experts)}


def check_experts(table: Mapping[str, CutOf], layers: nn.Module, ep: int) -> None:
    """Check that ``ep`` ranks can divide the experts of layers.

    Raises:
        PlanError: If the number of ranks does not fit the model.
        ModelError: If the table does not fit the model.
    """
    if not (found := experts_of(table, layers)):
        raise PlanError(
            f"parallel.ep={ep} divides experts, and the chain's cut has no Experts() that names a module: give it "
            'cut={"layers.*.experts": Experts(), …} of models.cut (docs/own_model.md), or set parallel.ep=1'
        )
    for name, module in found.items():
        sizes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
        if not sizes or len({shape[:1] for shape in sizes.values()}) > 1 or () in sizes.values():
            raise ModelError(
                f"cut: {name} has Experts(), so each of its parameters must be a stack with one row per expert, and "
                f"they are {', '.join(f'{key} {list(shape)}' for key, shape in sizes.items()) or 'none'}"
            )
        drops = any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules())
        if own := "dropout" if drops else next((key for key, _ in module.named_buffers()), None):
            raise ModelError(
                f"cut: {name} has Experts() and {own}, which does not know the samples of tokens that other ranks send "
                "or the numbers of their experts; keep it outside of the module"
            )
    counts = {name: Experts().count(module) for name, module in found.items()}
    if uneven := next((name for name, count in counts.items() if count % ep), None):
        fits = [str(n) for n in range(2, min(counts.values()) + 1) if not any(count % n for count in counts.values())]
        can = f"parallel.ep can be {', '.join(fits) or 1}"
        raise PlanError(f"parallel.ep={ep} does not divide the {counts[uneven]} experts of {uneven}; {can}")


def is_divided(table: Mapping[str, CutOf], names: Sequence[str], name: str, layer: nn.Module) -> bool:
    """Return whether ranks that split the sequence have only a part of it in the layer ``name``.

    The first of ``names`` gets the whole sequence, and so does the last one, unless the ranks split its vocabulary.
    """
    inner = (key for key, _ in layer.named_modules(prefix=name))
    return name != names[0] and (name != names[-1] or any(isinstance(cut_of(table, k), Vocabulary) for k in inner))


def check_cuts(
    table: Mapping[str, CutOf],
    tied: Mapping[str, str],
    names: Sequence[str],
    layers: nn.Module,
    tp: int,
    sequence: bool,
) -> None:
    """Check that ``tp`` ranks, which may split the sequence, can cut layers: the submodules ``names`` of ``layers``.

    Raises:
        PlanError: If the number of ranks does not fit the model.
        ModelError: If the table does not fit the model.
    """
    if all(isinstance(cut, Experts) for cut in table.values()):
        lines = ", ".join(f'"{name}": Columns() or Rows()' for name in _linear(layers)[:4]) or '"NAME": Columns()'
        raise PlanError(
            f"parallel.tp={tp} cuts layers, and this model does not say where: give its chain a table of the products "
            f"that are cut, cut={{{lines}, …}} (docs/own_model.md, 'Tensor parallelism'), or set parallel.tp=1"
        )
    check_table(table, layers, tied)
    for name in names:
        check_pairs(table, name, layers.get_submodule(name))
    last, head = names[-1], layers.get_submodule(names[-1])
    if sequence and len(names) > 1 and not is_divided(table, names, last, head) and loss_of(head) is not None:
        raise PlanError(
            f"parallel.sequence=true needs the vocabulary of {last} cut, whose loss gets a part of the sequence; add "
            "its projection to the chain's cut as Vocabulary(), or leave parallel.sequence out"
        )
    modules = [(name, module, cut_of(table, name)) for name, module in layers.named_modules()]
    cuts = {name: (module, cut) for name, module, cut in modules if isinstance(cut, Columns | Rows | Vocabulary)}
    for name, (module, cut) in cuts.items():
        if _divides(tp, module, cut):
            continue
        parts = _parts(module, cut)
        if isinstance(cut, Vocabulary):
            raise PlanError(f"parallel.tp={tp} ranks cannot share the {parts} words of {name}")
        what = "inputs"
        if isinstance(cut, Columns):
            what = f"heads of {cut.unit} columns" if cut.unit > 1 else "columns"
        largest = max(_parts(*pair) for pair in cuts.values() if not isinstance(pair[1], Vocabulary))
        fits = [str(n) for n in range(2, largest + 1) if all(_divides(n, *pair) for pair in cuts.values())]
        raise PlanError(
            f"parallel.tp={tp} does not divide the {parts} {what} of {name}; parallel.tp can be {', '.join(fits) or 1}"
        )


def _parts(module: nn.Module, cut: CutOf) -> int:
    """Return the number of a module's heads, columns, inputs or words that ranks can divide."""
    if isinstance(cut, Columns):
        return cut.heads(module)
    return module.get_parameter("weight").shape[isinstance(cut, Rows)]


def _divides(tp: int, module: nn.Module, cut: CutOf) -> bool:
    """Return whether ``tp`` ranks can divide a module: into equal parts, or by words, at least one word per rank."""
    parts = _parts(module, cut)
    if isinstance(cut, Vocabulary):
        return parts >= tp
    return parts % tp == 0 or (isinstance(cut, Columns) and cut.shared and tp % parts == 0)


def check_table(table: Mapping[str, CutOf], layers: nn.Module, tied: Mapping[str, str]) -> None:
    """Check that each pattern of a table names modules that can be cut that way. Raises ModelError.

    ``tied`` has the names of tied parameters.
    """
    modules, linear = dict(layers.named_modules()), _linear(layers)[:6]
    heads = [module.projection for module in modules.values() if isinstance(module, FusedHead)]
    for pattern, cut in table.items():
        if not isinstance(cut, CutOf):
            raise ModelError(f"cut: {pattern!r} has {cut!r}; it takes Columns(), Rows() or Vocabulary() of models.cut")
        if isinstance(cut, Refused):
            raise ModelError(f"parallel.tp: {pattern} cannot be cut: {cut.reason}; set parallel.tp=1")
        found = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ModelError(f"cut: {pattern!r} names no module of this model, which has {', '.join(linear)}")
        wanted = {Rows: (nn.Linear,), Vocabulary: (nn.Embedding, nn.Linear)}.get(type(cut), (nn.Module,))
        for name, module in found.items():
            if not isinstance(module, wanted):
                kinds = " or ".join(f"nn.{kind.__name__}" for kind in wanted)
                kind = type(module).__name__
                raise ModelError(f"cut: {name} is of the class {kind}, and {type(cut).__name__}() cuts an {kinds}")
            if isinstance(cut, Columns) and not list(module.parameters(recurse=False)):
                inner = [f"{name}.{key}" for key in _linear(module)]
                raise ModelError(f"cut: {name} has no parameters itself; name those inside it: {', '.join(inner)}")
            if isinstance(cut, Columns) and all(p.dim() < 2 for p in module.parameters(recurse=False)):
                raise ModelError(f"cut: {name} has no matrix whose outputs Columns() could divide; leave it out of cut")
            if isinstance(cut, Vocabulary) and isinstance(module, nn.Linear) and module not in heads:
                raise ModelError(f"cut: {name} is not the projection of a FusedHead, which Vocabulary() cuts")
            own = own_computation(module) if isinstance(cut, (Rows, Vocabulary)) and module not in heads else ""
            if own:
                raise ModelError(f"cut: {name} has {own}, which {type(cut).__name__}() would leave out")
    for alias, owner in tied.items():
        one, other = (name.rpartition(".")[0] for name in (alias, owner))
        if cut_of(table, one) != cut_of(table, other):
            raise ModelError(f"cut: {alias} and {owner} are one parameter, so cut {one} and {other} alike, or neither")


def own_computation(module: nn.Module) -> str:
    """Return a description of what a linear layer or embedding adds to torch's layer; empty if it adds nothing."""
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
        return "padding_idx or max_norm"
    own = type(module).forward not in (nn.Linear.forward, nn.Embedding.forward)
    return f"a forward of its own ({type(module).__name__})" if own and not hasattr(module, "computed") else ""  # LoRA


def check_pairs(table: Mapping[str, CutOf], layer: str, module: nn.Module) -> None:
    """Check that a layer with ``Columns`` also has ``Rows``, and vice versa. Raises ModelError."""
    cuts = {name: cut_of(table, name) for name, _ in module.named_modules(prefix=layer)}
    kinds: dict[type, list[str]] = {}
    for name, cut in cuts.items():
        kinds.setdefault(type(cut), []).append(name)
    for one, other in ((Columns, Rows), (Rows, Columns)):
        if one in kinds and other not in kinds:
            raise ModelError(
                f"cut: {', '.join(kinds[one][:4])} have {one.__name__}(), and nothing in {layer} has {other.__name__}()"
            )


def _linear(layers: nn.Module) -> list[str]:
    """Return the names of the linear layers in a module. An error message suggests them for cutting."""
    return [name for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
