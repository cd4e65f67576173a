"""Keeps torch from importing its compiler and sympy, which takes seconds, before something is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_COMPILER, _SYMPY = "torch._dynamo", "sympy"


def import_compiler_late() -> None:
    """Put stand-ins for torch's compiler and sympy into this process. Call it before other parts of torch are imported.

    torch imports its compiler to exclude functions of optimizers, modes and the meta device from compilation, and to
    recognize compiled modules; without compilation there are no such modules, and the functions can be called directly.
    It imports sympy to ask whether a size is a symbol; without compilation each size is a number. A stand-in imports
    the real module when torch or the user's code needs more of it.
    """
    if _COMPILER not in sys.modules:
        late = _Late(_COMPILER, graph_break=_nothing, disable=_unchanged)
        late.install()
        # Fake tensors read the compiler's settings from a file that does not import the compiler.
        spec = spec_from_file_location(f"{_COMPILER}.config", Path(torch.__file__).parent / "_dynamo" / "config.py")
        assert spec is not None and spec.loader is not None  # the file's name ends in .py
        late.config = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(late.config)
        # Asked for by process groups and DistributedDataParallel.
        late.trace_rules = _Late(f"{_COMPILER}.trace_rules", clear_lru_cache=_nothing)
        late.utils = _Late(f"{_COMPILER}.utils", get_optimize_ddp_mode=lambda: late.config.optimize_ddp)
    for module, functions in _OF_NUMBERS.items():
        if module not in sys.modules:
            _Late(module, **{name: partial(_of_numbers, module, name) for name in functions}).install()
    if _SYMPY not in sys.modules:
        _Late(_SYMPY).install()


# Classes that torch asks these modules for, to recognize their objects, of which there are none yet.
_CLASSES = {
    name: type(name, (base,), {})
    for name, base in {"OptimizedModule": object, "GuardOnDataDependentSymNode": RuntimeError, "Basic": object}.items()
}


def _first(known: Any) -> Any:
    return known


# What torch's functions for symbols return for numbers, and for tensors whose sizes are numbers.
_OF_NUMBERS: dict[str, dict[str, Callable]] = {
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_int", "guard_or_false", "guard_or_true"), _first),
        **dict.fromkeys(("guard_size_oblivious", "guarding_hint_or_throw", "statically_known_true"), _first),
        **dict.fromkeys(("_iterate_exprs", "_iterate_nodes"), lambda known: iter(())),
        **dict.fromkeys(("has_free_unbacked_symbols", "is_nested_int"), lambda known: False),
        "compute_unbacked_bindings": lambda symbols, *more: None,
        "free_unbacked_symbols": lambda known: set(),
        "has_guarding_hint": lambda known: True,
        "sym_and": lambda *known: all(known),
        "sym_eq": lambda a, b: tuple(a) == tuple(b) if isinstance(a, (tuple, list)) else a == b,
        "sym_or": lambda *known: any(known),
    },
    "torch.utils._sympy.functions": {"Max": max},
}


class _Late(ModuleType):
    """A stand-in for a module, which imports the real one when an attribute is used that it does not have."""

    config: ModuleType
    trace_rules: ModuleType
    utils: ModuleType

    def __init__(self, name: str, **own: Any) -> None:
        super().__init__(name)
        self.__dict__.update(own)
        self._given: list[tuple[dict[str, Any], str]] = []

    def install(self) -> None:
        """Take the place of the module."""
        self.__spec__, sys.modules[self.__name__] = find_spec(self.__name__), self

    def __getattr__(self, name: str) -> Any:
        asking = sys._getframe(1).f_globals
        by_torch = str(asking.get("__name__")).partition(".")[0] == "torch"
        if name.startswith("__") and (name != "__path__" or by_torch):  # submodules need the path of the real module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            if by_torch and name in _CLASSES:
                self._given.append((asking, name))
                return _CLASSES[name]
            del sys.modules[self.__name__]
            real = import_module(self.__name__)
            for variables, given in self._given:
                if variables.get(given) is _CLASSES[given]:
                    variables[given] = getattr(real, given)
        with suppress(ModuleNotFoundError):  # torch may mean a submodule
            return _attribute_or_submodule(self.__name__, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _attribute_or_submodule(module: str, name: str) -> Any:
    real = import_module(module)
    return getattr(real, name) if hasattr(real, name) else import_module(f"{module}.{name}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Without compilation there is no graph to break."""


def _unchanged(function: Callable | None = None, *args: Any, **kwargs: Any) -> Callable:
    """Return a function unchanged. Without a function, return a decorator that does the same."""
    return (lambda decorated: decorated) if function is None else function


def _of_numbers(module: str, name: str, *values: Any, **options: Any) -> Any:
    if not options and all(map(_has_numbers, tree_leaves(values))):
        return _OF_NUMBERS[module][name](*values)
    return getattr(import_module(module), name)(*values, **options)


def _has_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(isinstance(size, int) for size in value.shape)
    return value is None or isinstance(value, (bool, int, float))
