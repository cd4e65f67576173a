"""Joins modules of the user with packages of this project that have the same name: models/mynet.py is models.mynet.

A package of this project is found first, wherever its folder is on sys.path. A name that it lacks is looked for in the
user's NAME.py or NAME/__init__.py, which is run at that moment, or before the first module of the user's package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_NAMES = ("common", "benchmarks", "conf", "data", "launchers", "models", "parallel", "planner", "training")
_MARK = "training/command/app.py"  # a folder with this file is a copy of this project
_run: set[str] = set()  # the user's files that were run in a package of this project


class _Finder:
    """Finds the modules of the packages in ``_NAMES``."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _NAMES:
            return None
        found: Any = _in_folder(fullname, _ROOT)
        if found is not None and found.origin is not None and found.submodule_search_locations is not None:
            run = found.loader.exec_module
            found.loader.exec_module = lambda module: (run(module), _open(module))
        if found is None and (found := next(theirs(fullname), None)) is not None:
            parent = fullname.rpartition(".")[0]
            if _in_folder(parent, _ROOT) is not None:  # otherwise Python has run the file of the parent
                _fill(sys.modules[parent])
            if (loaded := sys.modules.get(fullname)) is not None:  # by the file of the parent: not a second time
                loaded.__spec__ = None
                found.loader = SimpleNamespace(create_module=lambda spec: loaded, exec_module=lambda module: None)
        return found


def theirs(fullname: str) -> Iterator[ModuleSpec]:
    """Yield the specs of the user's modules with this name, in the order of sys.path.

    Raises:
        UserError: See ``check_folder``.
    """
    for folder in map(os.path.abspath, sys.path):
        if not os.path.isfile(os.path.join(folder, _MARK)) and (spec := _in_folder(fullname, folder)) is not None:
            if spec.origin is not None:  # None: a folder without files of Python itself
                check_folder(folder)
            yield spec


def _in_folder(fullname: str, folder: str | Path) -> ModuleSpec | None:
    return PathFinder.find_spec(fullname, [os.path.join(folder, *fullname.split(".")[:-1])])


def check_folder(folder: str) -> None:
    """Check a folder of the user, which is not one of installed packages.

    Raises:
        UserError: A module in it has the name of one of this project's.
    """
    if folder.endswith("-packages") or os.path.isfile(os.path.join(folder, _MARK)):
        return
    for name in (name for name in _NAMES if os.path.isdir(os.path.join(folder, name))):
        for file in Path(_ROOT, name).rglob("*.py"):
            module = file.relative_to(_ROOT).with_suffix("")
            for end in (".py", "/__init__.py") if file.name != "__init__.py" else ():
                _check_name(".".join(module.parts), file, Path(f"{folder}/{module}{end}"))


def _check_name(name: str, first: Any, second: Path) -> None:
    if second.is_file():
        from common.errors import UserError

        raise UserError(f"two files have {name}: {first} and {second}; rename the second, as the first hides it")


def _open(module: ModuleType) -> None:
    """Let a package of this project provide the names of the user's module with the same name."""

    def missing(name: str) -> Any:
        if not name.startswith("__") and _in_folder(f"{module.__name__}.{name}", _ROOT) is None:
            _fill(module)
        if name in vars(module):
            return vars(module)[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)

    vars(module)["__getattr__"] = missing


def _fill(module: ModuleType) -> None:
    """Run the user's file of a package's name in the package, once."""
    spec = next((spec for spec in theirs(module.__name__) if spec.origin is not None), None)
    if spec is not None and spec.origin not in (module.__file__, *_run):  # __file__: it is running now
        _run_in(module, spec)
        _run.add(str(spec.origin))


def _run_in(module: ModuleType, spec: Any) -> None:
    """Run a second file in a module. Raises UserError if both files define the same name."""
    before, names = dict(vars(module)), vars(module)
    names.update(__file__=spec.origin, __path__=spec.submodule_search_locations or names["__path__"])
    try:
        exec(spec.loader.get_code(module.__name__), names)
        both = [name for name, item in before.items() if not name.startswith("__") and names.get(name) is not item]
    finally:
        names.update(before)
    for name in both:
        _check_name(f"{module.__name__}.{name}", before.get("__file__"), Path(spec.origin))


def is_here(target: str) -> bool:
    """Return whether a dotted name is defined in a file of this project, not in a file of the user."""
    *parents, name = target.split(".")
    place = _ROOT.joinpath(*parents)
    is_package = (place / "__init__.py").is_file()
    return place.with_suffix(".py").is_file() or (is_package and name in vars(import_module(".".join(parents))))


sys.meta_path.insert(0, _Finder)
for _module in filter(None, map(sys.modules.get, _NAMES)):  # imported before this: maybe the user's
    _folder = os.path.dirname(next(iter(getattr(_module, "__path__", [_module.__file__]))))
    if not os.path.samefile(_folder, _ROOT):
        vars(_module)["__path__"] = [str(_ROOT / _module.__name__), *getattr(_module, "__path__", ())]
        check_folder(_folder)
        _run_in(_module, _in_folder(_module.__name__, _ROOT))
    _open(_module)
