"""The parameters of a function or class, read from its source: nothing is imported.

``model``, ``data``, ``optim``, ``scheduler`` and ``logger`` sections name a ``_target_``. The keys of such a section,
their types and their defaults are the target's parameters. Importing the targets would import torch, which takes more
than a second; parsing their source takes milliseconds, so ``--help``, ``--cfg job`` and errors stay fast.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str}
_LISTS = ("list", "tuple", "List", "Tuple", "Sequence")


@dataclass(frozen=True)
class Parameter:
    """One parameter that a configuration may set.

    Attributes:
        name: Its name in the signature and in the configuration.
        kind: A type that OmegaConf checks: a simple type, an ``Enum`` for a ``Literal`` of words, ``list[...]``, or
            ``Any`` for every other annotation. ``kind | None`` where None is allowed.
        default: The default value; ``dataclasses.MISSING`` where the configuration has to give one.
    """

    name: str
    kind: Any
    default: Any


def parameters(target: str) -> list[Parameter] | None:
    """The parameters of ``target`` ("package.module.name") that a configuration may set, in order.

    A parameter whose default cannot be told from the source (``float("inf")``) is left out and keeps its default.
    A class that passes ``**options`` on to its base class has the base's parameters too.

    Args:
        target: The dotted name of a function or class.

    Returns:
        The parameters; None where the source of ``target`` is not found (a compiled package, a misspelled name).
    """
    module, _, name = target.rpartition(".")
    found = _definition(module, name)
    if found is None or not isinstance(found[1], (ast.FunctionDef, ast.ClassDef)):
        return None
    return list(_parameters(*found).values())


def _parameters(module: str, node: ast.FunctionDef | ast.ClassDef) -> dict[str, Parameter]:
    if isinstance(node, ast.FunctionDef):
        return {p.name: p for p in _own_parameters(module, node.args)}
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    own = {} if init is None else {p.name: p for p in _own_parameters(module, init.args) if p.name != "self"}
    if init is not None and init.args.kwarg is None:
        return own
    for base in node.bases:
        where, _, name = ast.unparse(base).rpartition(".")  # torch.optim.SGD after `import torch`
        found = _definition(where or module, name) if isinstance(base, (ast.Name, ast.Attribute)) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            return own | {name: p for name, p in _parameters(*found).items() if name not in own}
    return own


def _own_parameters(module: str, args: ast.arguments) -> Iterator[Parameter]:
    positional = args.posonlyargs + args.args
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    for arg, default in pairs:
        try:
            value = MISSING if default is None else _value(module, default)
        except ValueError:
            continue
        yield _parameter(module, arg, value)


def _parameter(module: str, arg: ast.arg, value: Any) -> Parameter:
    kind = _kind(module, arg.annotation, arg.arg)
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__:
        value = kind[value]
    if value is None:
        kind = Any if kind is Any else kind | None
    return Parameter(arg.arg, kind, list(value) if isinstance(value, tuple) else value)


def _value(module: str, node: ast.expr) -> Any:
    """A default: a literal, or a constant that the module defines or imports. Raises ValueError for others."""
    if isinstance(node, ast.Name):
        found = _definition(module, node.id)
        if found is None or not isinstance(found[1], ast.expr):
            raise ValueError(node.id)
        return _value(*found)
    if isinstance(node, ast.Tuple):
        return tuple(_value(module, item) for item in node.elts)
    return ast.literal_eval(node)


def _kind(module: str, node: ast.expr | None, name: str) -> Any:
    """The type that OmegaConf is to check for an annotation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.Name):
        if node.id in _SIMPLE:
            return _SIMPLE[node.id]
        found = _definition(module, node.id)
        return _kind(*found, name) if found is not None and isinstance(found[1], ast.expr) else Any
    if isinstance(node, (ast.BinOp, ast.Subscript)):
        members = _union(node)
        if members is not None:
            return _kind_of_union(module, members, name)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Literal":
            words = [word.value for word in inside if isinstance(word, ast.Constant)]
            text = len(words) == len(inside) and all(isinstance(word, str) for word in words)
            return Enum(name, {word: word for word in words}, type=str) if text else Any
        if node.value.id in _LISTS:
            kinds = {_kind(module, n, name) for n in inside if not _is(n, ...)}
            return list[kinds.pop()] if len(kinds) == 1 and kinds <= set(_SIMPLE.values()) else Any
    return Any


def _union(node: ast.expr) -> list[ast.expr] | None:
    """The members of ``a | b``, ``Union[a, b]`` or ``Optional[a]``; None for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*(_union(node.left) or [node.left]), *(_union(node.right) or [node.right])]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Optional":
            return [node.slice, ast.Constant(None)]
        if node.value.id == "Union" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts
    return None


def _kind_of_union(module: str, members: list[ast.expr], name: str) -> Any:
    # A configuration holds no tensors: "float | Tensor" is a float.
    rest = [n for n in members if not _is(n, None) and not (isinstance(n, ast.Name) and n.id == "Tensor")]
    kind = _kind(module, rest[0], name) if len(rest) == 1 else Any
    return kind | None if kind is not Any and any(_is(n, None) for n in members) else kind


def _is(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _definition(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Where ``name`` is defined and as what (function, class or value), following imports of names."""
    for _ in range(8):  # imports of a name from module to module; more are a circle
        node = _names(module).get(name)
        if not isinstance(node, tuple):
            return None if node is None else (module, node)
        module, name = node
    return None


@cache
def _names(module: str) -> dict[str, ast.AST | tuple[str, str]]:
    """What a module's top level defines: name -> its node, or (module, name) for an imported one."""
    path = _source(module)
    if path is None:
        return {}
    names: dict[str, ast.AST | tuple[str, str]] = {}
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            names |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id: node.value for t in targets if isinstance(t, ast.Name)}
    return names


def _source(module: str) -> Path | None:
    """The source file of a module. Only the top-level package is searched for: finding more would import it."""
    top, *parts = module.split(".")
    spec = find_spec(top) if top else None
    if spec is None:
        return None
    for location in spec.submodule_search_locations or []:
        path = Path(location, *parts)
        for file in (path / "__init__.py", path.with_suffix(".py") if parts else path):
            if file.is_file():
                return file
    return Path(spec.origin) if spec.origin and not parts and spec.origin.endswith(".py") else None
