"""Configurations as plain data, and the objects that they describe."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from operator import getitem
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf, ValidationError, nodes
from omegaconf.errors import OmegaConfBaseException

from common.errors import PlanError, TrainingError, UserError
from common.namesakes import is_here, theirs
from common.packages import load_torchmetrics
from conf import keys_of, options
from conf.messages import interrupt_in, unknown_key
from conf.schema import Root
from parallel.strategies import OWN, STRATEGIES, StrategyInfo

# A section of a checkpoint may only name public classes of these packages ...
PACKAGES = ("models", "data", "parallel", "training", "torch.nn", "torch.optim", "torchmetrics")
# ... and functions of these, which only compute. Functions elsewhere also write files and start processes.
FUNCTIONS_OF = ("models",)


@dataclass(frozen=True)
class Role:
    """Requirements on an object that a section of the configuration builds or a Python program passes.

    Attributes:
        what: A description of the object, for messages.
        way_out: How to specify one, for messages.
        kinds: Dotted names of classes. The object must be an instance of one of them; empty for any class.
        methods: Names of methods.
        least: The number of ``methods`` that it must have at least.
    """

    what: str
    way_out: str
    kinds: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    least: int = 1

    def fits(self, item: Any) -> bool:
        """Return whether an object, or the objects of a class, can play the role."""
        if self.kinds:
            kinds = tuple(map(resolve, self.kinds))
            return issubclass(item, kinds) if inspect.isclass(item) else isinstance(item, kinds)
        return sum(callable(getattr(item, method, None)) for method in self.methods) >= self.least


CALLBACK_METHODS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")
ROLES = {
    "model": Role(
        "a model (an nn.Module, or a models.chain.Chain)",
        "choose one by model=NAME; from Python, train(model=nn.Sequential(...), loss=nn.CrossEntropyLoss())",
        kinds=("models.chain.Chain", "torch.nn.Module"),
    ),
    "data": Role(
        "a data set (data.dataset.DataSet)",
        "choose one by data=NAME; from Python, data=data.tensors.TensorData(inputs, targets) of tensors or arrays",
        kinds=("data.dataset.DataSet",),
    ),
    "optim": Role(
        "an optimizer (torch.optim.Optimizer)",
        "choose one by optim=NAME, or name a class such as torch.optim.RMSprop",
        kinds=("torch.optim.Optimizer",),
    ),
    "scheduler": Role(
        "a schedule, with a method factor(step, total, per_epoch)", "choose one by scheduler=NAME", methods=("factor",)
    ),
    "logger": Role(
        "a logger, with the methods log and finish",
        "choose one by logger=NAME, or logger=none",
        methods=("log", "finish"),
        least=2,
    ),
    "parallel.axes": Role(
        "an axis (parallel.axes.axis.Axis)", "see docs/extending.md, 'An axis'", kinds=("parallel.axes.axis.Axis",)
    ),
    "parallel": Role("a strategy", "see docs/extending.md, 'A strategy'", kinds=("parallel.strategy.Strategy",)),
    "callbacks": Role(
        f"a callback: it has none of the methods {', '.join(CALLBACK_METHODS)}",
        "write callbacks=[early_stop] (an option of conf/callback/) or 'callbacks=[{_target_: mypackage.MyCallback}]'",
        methods=CALLBACK_METHODS,
    ),
}


def add_to_path(folders: Sequence[str]) -> None:
    """Let Python search for modules also in the working directory and in these folders, after all other folders."""
    sys.path.extend(folder for folder in (os.getcwd(), *folders) if folder not in sys.path)


def use_code_of(cfg: Root) -> None:
    """Let this process import the user's code, and register the strategy ``parallel.strategy``.

    Raises:
        UserError: ``parallel.strategy`` does not name a strategy, has unknown keys, or its name is taken; or a section
            of ``parallel.axes`` does not name an axis and its number of ranks.
    """
    add_to_path(cfg.import_from or ())
    if not isinstance(cfg.parallel.axes or {}, Mapping | DictConfig):
        raise PlanError(f"parallel.axes={cfg.parallel.axes} must have a section for each axis, by its name")
    for name, section in (cfg.parallel.axes or {}).items():
        item, keys = target_of(f"parallel.axes.{name}", section), to_dict(section)
        ranks = keys.get("ranks")
        fits = inspect.isclass(item) and keys.keys() == {"_target_", "ranks"} and type(ranks) is int and ranks > 0
        if not fits or not str(name).isidentifier():
            raise PlanError(
                f"parallel.axes.{name}={keys} must have a name, and the keys _target_, a class, and ranks, a number of "
                "at least 1: parallel.axes={mirror: {_target_: mine.Mirror, ranks: 2}}"
            )
    if (section := cfg.parallel.strategy) is not None:
        item, keys, name = target_of("parallel.strategy", section), to_dict(section), cfg.parallel.name
        keys["class_path"] = f"{item.__module__}:{item.__qualname__}"
        del keys["_target_"]
        if name in STRATEGIES:
            raise PlanError(f"parallel.strategy needs another parallel.name than {name}, which is not yours")
        OWN[name] = StrategyInfo(**checked_arguments("parallel.strategies.StrategyInfo", keys, "parallel.strategy."))


def literal(node: Any) -> Any:
    """Return a copy of plain data, escaped so that OmegaConf does not read any text as an interpolation."""
    if isinstance(node, dict):
        return {key: literal(item) for key, item in node.items()}
    if isinstance(node, list):
        return [literal(item) for item in node]
    return re.sub(r"(?<!\\)(\\*)\$\{", r"\1\1\${", node) if isinstance(node, str) else node


def to_dict(cfg: Any) -> dict:
    """Return a dict of dicts, lists, numbers and strings, with interpolations resolved and enum members by name.

    Raises:
        omegaconf.errors.OmegaConfBaseException: A value is missing or cannot be resolved.
    """
    if not OmegaConf.is_config(cfg):
        cfg = to_config(cfg)
    tree: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True, throw_on_missing=True)
    return tree


def to_config(tree: dict) -> Any:
    """Convert plain data to a read-only configuration. The reverse of ``to_dict``."""
    try:
        return OmegaConf.create(literal(tree) if "${" in str(tree) else tree, flags={"readonly": True})
    except OmegaConfBaseException as error:
        raise interrupt_in(error) or error from None


def with_values(cfg: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of ``cfg`` with some values replaced. ``values`` has the new ones, as in ``{"parallel.dp": 2}``."""
    tree = to_dict(cfg)
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, tree)[name] = value
    return to_config(tree)


def in_section(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a section as ``with_values`` takes them."""
    return {f"{section}.{key}": value for key, value in keys.items()}


def check_sections(cfg: DictConfig) -> None:
    """Check that every section of a composed configuration is a mapping.

    Raises:
        TrainingError: A file or a program has put a word, a number, a list or nothing in its place.
    """
    for key in ("model", "data", "optim", "scheduler", "parallel", "logger", "launcher", "loggers"):
        section = cfg.get(key)
        if not hasattr(section, "keys") and not (key == "loggers" and section is None):
            shown = "null" if section is None else section
            raise TrainingError(
                f"{key}={shown} is not a section of keys: choose an option, by {key}=NAME on the command "
                f"line, '- override /{key}: NAME' in a file's defaults list, or load_config('{key}=NAME') from Python"
            )


def environment(cfg: Root) -> dict[str, str]:
    """Return the variables of ``parallel.env``, such as {"NCCL_DEBUG": "INFO"}; raise PlanError if not a mapping."""
    wanted = cfg.parallel.env or {}
    if not hasattr(wanted, "items"):
        raise PlanError(f"parallel.env={wanted} must be a mapping, such as parallel.env={{NCCL_DEBUG: INFO}}")
    if nulls := [name for name, value in wanted.items() if value is None]:
        raise PlanError(f"parallel.env.{nulls[0]}=null is no value of a variable: leave it out, or write a text")
    if odd := [name for name in wanted if not isinstance(name, str)]:
        raise PlanError(f"parallel.env={wanted}: {odd[0]!r} is no name of a variable; write it in quotes, in a file")
    return {str(name): str(value) for name, value in wanted.items()}


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``_target_`` of a configuration section with the section's other keys as keyword arguments.

    Sections inside it that name a target are built first. ``args`` and ``kwargs``, further arguments of the target, are
    passed unchanged.

    Raises:
        TrainingError: The target does not exist, does not have a parameter, or raises ``ValueError``. Other errors of
            the user's code are raised unchanged.
    """
    return _build(to_dict(node), args, kwargs)


def build(role: str, section: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the object of a section of the configuration, and check that it can play ``role``.

    ``role`` is a key of ``ROLES`` or a path below it, such as ``callbacks.early_stop``. Further arguments are those of
    ``instantiate``.

    Raises:
        TrainingError: See ``target_of``, ``check_role`` and ``instantiate``.
    """
    target_of(role, section)
    return check_role(role, _build(to_dict(section), args, kwargs, role), section["_target_"])


def target_of(role: str, section: Any) -> Any:
    """Return the class or function that a section names.

    Raises:
        TrainingError: ``section`` has no ``_target_``, or names a class of another kind.
    """
    if not hasattr(section, "keys") or "_target_" not in section:
        raise TrainingError(f"{role}: {section} is not a section with a _target_; {_role(role).way_out}")
    target = resolve(section["_target_"])
    if inspect.isclass(target):
        _check_fits(role, target, section["_target_"])
    return target


def _role(path: str) -> Role:
    """Return the role of the object at a path of a configuration."""
    path = path.replace("loggers.", "logger.", 1)
    return next(role for key, role in ROLES.items() if f"{path}.".startswith(f"{key}."))


def check_section(role: str, section: Any) -> None:
    """Check the target and the types of the values of a section without building it. See ``target_of``."""
    target_of(role, section)
    arguments = {key: value for key, value in to_dict(section).items() if key != "_target_"}
    checked_arguments(section["_target_"], arguments, f"{role}.")


def check_role(role: str, item: Any, name: str | None = None) -> Any:
    """Return ``item`` if it can play a role of ``ROLES``. ``name`` is its target. No method of it is called.

    Raises:
        TrainingError: The item cannot play the role. The message states how to specify an object that can.
    """
    if inspect.isclass(item):
        raise TrainingError(f"{role}: {_name_of(item)} is a class; give an object: {item.__name__}(...)")
    _check_fits(role, item, name or _name_of(item if inspect.isroutine(item) else type(item)))
    return item


def _check_fits(role: str, item: Any, name: str) -> None:
    if not _role(role).fits(item):
        raise TrainingError(f"{role}: {name} is not {_role(role).what}; {_role(role).way_out}")


def _name_of(item: Any) -> str:
    return item.__qualname__ if item.__module__ == "builtins" else f"{item.__module__}.{item.__qualname__}"


def _build(node: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None, where: str = "") -> Any:
    if isinstance(node, list):
        return [_build(item, where=f"{where}[{index}]") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    path = f"{where}." if where else ""
    built = {key: _build(value, where=f"{path}{key}") for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return built | dict(kwargs or {})
    target = resolve(node["_target_"])
    built = checked_arguments(node["_target_"], built, path) | dict(kwargs or {})
    try:
        inspect.signature(target).bind(*args, **built)
    except TypeError as error:
        raise TrainingError(f"_target_={node['_target_']}: {error}") from None
    try:
        return target(*args, **built)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise TrainingError(str(error)) from error


@cache
def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class by name; if it takes ``**options``, also those of its base."""
    known: dict[str, inspect.Parameter] = {}
    for item in inspect.getmro(target) if inspect.isclass(target) else (target,):
        function = vars(item).get("__init__") if inspect.isclass(item) else item
        if not inspect.isfunction(function):
            continue
        declared = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        with suppress(NameError, TypeError):  # an annotation that is only defined for type checkers
            hints = get_type_hints(function)
            declared = [p.replace(annotation=hints.get(p.name, Any)) for p in declared]
        known = {p.name: p for p in declared if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} | known
        if inspect.Parameter.VAR_KEYWORD not in [p.kind for p in declared]:
            break
    return known


def checked_arguments(name: str, arguments: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the arguments of a section, converted to its target's annotations: 1 becomes 1.0 for a float.

    ``path`` is the prefix of their keys in the configuration: "optim.".

    Raises:
        TrainingError: A value has another type, or a class that takes ``**options`` has no such parameter.
    """
    target = resolve(name)
    known = parameters(target)
    strange = [key for key in arguments if known and key not in known] if inspect.isclass(target) else []
    group = path.removesuffix(".")
    for option in options(group) if strange else ():  # a section that was typed takes the place of the _target_ alone
        keys = keys_of(group, option)
        if keys.pop("_target_", name) != name and {*strange} <= keys.keys() <= arguments.keys():
            without = " ".join(f"~{path}{key}" for key in strange)
            raise TrainingError(f"{name} has no {', '.join(strange)}, which {group}={option} sets: add {without}")
    if strange:
        options_of = [p.name for p in known.values() if p.default is not p.empty]
        raise TrainingError(f"{unknown_key(f'{path}{strange[0]}', options_of)} (the options of {name})")
    return {
        key: _as_annotated(value, known[key], f"{path}{key}") if key in known else value
        for key, value in arguments.items()
    }


# The conversions of the sections that have a dataclass.
_NODES = {int: nodes.IntegerNode, float: nodes.FloatNode, bool: nodes.BooleanNode, str: nodes.StringNode}


def _as_annotated(value: Any, parameter: inspect.Parameter, key: str) -> Any:
    kind, optional = parameter.annotation, parameter.default is None
    if get_origin(kind) in (Union, UnionType):
        members = [one for one in get_args(kind) if getattr(one, "__name__", "") != "Tensor"]  # no key is a tensor
        optional |= NoneType in members
        members = [member for member in members if member is not NoneType]
        kind = members[0] if len(members) == 1 else Any
    if value is None and optional:
        return None
    if get_origin(kind) is Literal and not isinstance(value, dict):
        if value not in get_args(kind):
            words = ", ".join(map(str, get_args(kind)))
            raise TrainingError(f"{key}: Invalid value {value!r}, expected one of [{words}]")
    elif get_origin(kind) in (list, tuple, Sequence) and not isinstance(value, (list, tuple)):
        raise TrainingError(f"{key} is a list: write {key}=[…]")
    elif (node := _NODES.get(kind)) is not None and type(value) is not kind:
        try:
            return node(value, is_optional=False)._value()
        except ValidationError:
            wanted = node.__name__.removesuffix("Node")
            problem = f"Value {value!r} of type {type(value).__name__!r} could not be converted to {wanted}"
            raise TrainingError(f"{key}: {problem}") from None
    return value


def resolve(target: Any) -> Any:
    """Return the class or function that ``target`` ("package.module.name") names.

    Raises:
        TrainingError: There is none, or it needs a package that is not installed.
    """
    module, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not module:
        raise TrainingError(f"_target_={target} names nothing: write the dotted name of a class, mypackage.MyClass")
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and len(files := [spec.origin for spec in theirs(top)]) > 1:
        raise TrainingError(f"_target_={target}: {top} is {files[0]}, of Python, and not {files[1]}: rename yours")
    if not is_ours(target):
        next(theirs(module), None)  # an error if their folder has a file of the name of one of this project's
    if top == "torchmetrics":
        load_torchmetrics()
    try:
        item = getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        hint = "start in the folder of its package, or add that folder to PYTHONPATH"
        if (found := getattr(sys.modules.get(module), "__file__", None)) is not None:
            hint = f"{module} is {found}"
        raise TrainingError(f"_target_={target} names nothing: {error}; {hint}") from error
    if not inspect.isclass(item) and not inspect.isfunction(item):
        raise TrainingError(f"_target_={target} is neither a class nor a function")
    package = getattr(item, "requires", None)  # the optional package that a class needs
    if package is not None and find_spec(package.partition("-")[0]) is None:
        raise TrainingError(f"{target} needs a package that is not installed: pip install {package}")
    return item


def targets(tree: Any) -> list[Any]:
    """Return all targets that a tree names, at any depth."""
    if not isinstance(tree, (dict, list)):
        return []
    found = [tree["_target_"]] if isinstance(tree, dict) and "_target_" in tree else []
    items = tree.values() if isinstance(tree, dict) else tree
    return found + [target for item in items for target in targets(item)]


def why_foreign(target: Any) -> str | None:
    """Return why a target that the user did not name must not be built; None if it may be built.

    It may be a public class of ``PACKAGES`` or a public function of ``FUNCTIONS_OF``, if it is defined there and not
    imported from elsewhere.
    """
    if not is_ours(str(target)):
        return "it is of another package"
    if any(part.startswith("_") for part in target.split(".")):
        return "it is private"
    item = resolve(target)
    home = f"{item.__module__}.{item.__qualname__}"
    if not is_ours(home):
        return f"it is {home}"
    return None if inspect.isclass(item) or is_ours(home, FUNCTIONS_OF) else "it is a function"


def is_ours(name: str, packages: Sequence[str] = PACKAGES) -> bool:
    """Return whether a dotted name is in one of the packages, and not in a file that the user has added to one."""
    return name.startswith(tuple(f"{package}." for package in packages)) and (
        name.startswith(("torch.", "torchmetrics.")) or is_here(name)
    )
