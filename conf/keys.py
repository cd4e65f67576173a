"""The keys of the configuration with their defaults, choices and meanings, for the help and docs/reference.md.

The meaning of a key is the comment at the end of its line, in conf/schema.py for the sections that have a schema and in
the YAML file of an option for the others. The comment at the top of a file describes the option.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from omegaconf import OmegaConf
from yaml.constructor import BaseConstructor
from yaml.nodes import MappingNode, Node, ScalarNode

from conf import FOLDER
from conf.composition import compose
from conf.schema import SCHEMAS, Root

# The section of a group's options, where it is not the group's name: callbacks=[early_stop] sets callbacks.early_stop.
# An experiment and a debug option set keys of other sections only.
_SECTIONS = {"callbacks": "callbacks.{}", "experiment": None, "debug": None}
# Keys of a file that say how the option is built, and the recipes, which are values for other groups.
_NOT_LISTED = ("_target_", "defaults", "recipes")


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: The key as it is typed, such as "parallel.dp".
        default: The default as it is typed; None for a section, which has keys of its own.
        meaning: One sentence.
        choices: The values that are allowed; empty if there are many.
    """

    name: str
    default: str | None
    meaning: str
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Option:
    """An option of a group.

    Attributes:
        word: How it is typed, such as "model=gpt2".
        about: The comment at the top of its file, with its lines.
        keys: The keys of its section.
        sets: The words that have the effect of its other lines, such as "data=torch_docs" and "train.steps=18".
        recipes: The names of its recipes.
        schema: The name of its schema in ``conf.schema.SCHEMAS``; None if the file itself lists the keys.
    """

    word: str
    about: str
    keys: Sequence[Key]
    sets: Sequence[str]
    recipes: Sequence[str]
    schema: str | None

    @property
    def summary(self) -> str:
        """The first sentence of ``about``."""
        return re.split(r"(?<=[.?])\s|$", " ".join(self.about.split()), maxsplit=1)[0].rstrip(".")


def groups() -> dict[str, str]:
    """Return the folder in conf/ of each group, by its name on the command line."""
    folders = sorted(path.name for path in FOLDER.iterdir() if path.name != "hydra" and any(path.glob("*.yaml")))
    return {"callbacks" if folder == "callback" else folder: folder for folder in folders}


def files(group: str, folders: Sequence[Path] = (FOLDER,)) -> dict[str, Path]:
    """Return the file of each option of a group, by the option's name. Later folders win."""
    found = {path.stem: path for folder in folders for path in (folder / groups()[group]).glob("*.yaml")}
    return dict(sorted(found.items()))


def read_options(group: str, folders: Sequence[Path] = (FOLDER,)) -> list[Option]:
    """Return the options of a group."""
    return [read_option(group, name, file) for name, file in files(group, folders).items()]


def read_option(group: str, name: str, file: Path) -> Option:
    """Return an option of a group, as its file describes it."""
    text = file.read_text(encoding="utf-8")
    root, head = yaml.compose(text), re.findall(r"\A(?:#.*\n)*", text)[0].splitlines()
    about = "\n".join(line[2:] for line in head if not line.startswith("# @package"))
    tree, content = dict(_items(root)), yaml.safe_load(text) if isinstance(root, MappingNode) else {}
    section = _SECTIONS.get(group, group)
    section = section and section.format(name)
    is_global = re.search(r"^# @package _global_", text, re.M)
    own = tree.get(section) if is_global else root
    keys = list(_yaml_keys(own, section, text.splitlines())) if section and isinstance(own, MappingNode) else []
    others = {key: node for key, node in tree.items() if is_global and key != section and key not in _NOT_LISTED}
    sets, schema = [], None
    for item in content.get("defaults") or ():
        [(place, chosen)] = item.items() if isinstance(item, dict) else [(str(item), "")]
        word, _, where = place.partition("@")
        if place.startswith("override /"):
            sets.append(f"{place.removeprefix('override /')}={_typed(chosen)}")
        elif word.startswith("/schema/"):
            schema = word.removeprefix("/schema/")
            of_schema = schema_keys(SCHEMAS[schema], group)
            keys = _over(of_schema, keys)[: len(of_schema)]
        elif where == "_here_" and not word.startswith("/"):  # it extends ``device@_here_: a100`` or ``a100@_here_``
            there = (Path(at, word, str(chosen)) for at in (file.parent, FOLDER / groups()[group]))
            files = (path.with_name(f"{path.name}.yaml") for path in there)
            if extended := next(filter(Path.is_file, files), None):  # composing says what is missing, and helps
                keys = _over(read_option(group, extended.stem, extended).keys, keys)
    sets += [word for key, node in others.items() for word in _words(node, key)]
    typed = f"callbacks=[{name}]" if group == "callbacks" else f"{group}={name}"
    return Option(typed, about, keys, sets, [*(content.get("recipes") or ())], schema)


def _over(keys: Sequence[Key], given: Sequence[Key]) -> list[Key]:
    """Return some keys with the defaults, and the meanings if any, of ``given``, and then the keys that are new."""
    new = {key.name: key for key in given}
    both = [(key, new.pop(key.name, key)) for key in keys]
    return [replace(key, default=own.default, meaning=own.meaning or key.meaning) for key, own in both] + [
        *new.values()
    ]


def common_keys(section: str) -> list[Key]:
    """Return the keys that every option of a group has in addition to its own: those in conf/train.yaml."""
    text = (FOLDER / "train.yaml").read_text(encoding="utf-8")
    node = dict(_items(yaml.compose(text))).get(section)
    return [] if node is None else list(_yaml_keys(node, section, text.splitlines()))


def sections() -> dict[str, Any]:
    """Return the schemas of the sections that are no groups, such as ``train``, by name."""
    return {name: node for name, node in get_type_hints(Root).items() if is_dataclass(node)}


@cache
def schema_keys(node: type, section: str = "") -> Sequence[Key]:
    """Return the keys of a schema, whose section is ``section``, without those that are sections or groups."""
    prefix = f"{section}." if section else ""
    comments = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(node), re.M))
    hints, keys = get_type_hints(node), []
    for item in fields(node):
        if is_dataclass(hints[item.name]) or node is Root and item.name in groups().values():
            continue
        value = item.default if item.default_factory is MISSING else item.default_factory()
        meaning, choices = comments.get(item.name, ""), _choices(hints[item.name])
        keys.append(Key(f"{prefix}{item.name}", _typed(value), meaning, choices))
    return keys


def described(node: type) -> str:
    """Return what the docstring of a schema says."""
    return " ".join((node.__doc__ or "").replace("``", "").split())


def resolved(keys: Sequence[Key], words: Sequence[str]) -> list[Key]:
    """Return the keys with the values that they have after ``words``, where a default refers to other keys."""
    if not any("${" in (key.default or "") for key in keys):
        return list(keys)
    cfg = _composed(*words)
    return [replace(key, default=_value(cfg, key.name, key.default)) for key in keys]


def resolved_words(sets: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the words that an option sets with the values that they have after ``words``."""
    pairs = [word.partition("=")[::2] for word in sets]
    return [f"{key.name}={key.default}" for key in resolved([Key(key, value, "") for key, value in pairs], words)]


@cache
def _composed(*words: str) -> Any:
    return compose(words)


def _value(cfg: Any, name: str, default: str | None) -> str | None:
    # What comes from the environment may be secret, and may be missing.
    if default is None or "${" not in default or "oc.env" in default:
        return default
    return _typed(OmegaConf.select(cfg, name))


def _items(node: Node | None) -> Iterator[tuple[str, Node]]:
    return ((key.value, value) for key, value in node.value) if isinstance(node, MappingNode) else iter(())


def _yaml_keys(node: Node, section: str, lines: list[str]) -> Iterator[Key]:
    for key_node, value in node.value:
        key, is_section = key_node.value, _is_section(value)
        if key in _NOT_LISTED:
            continue
        is_one_line = value.start_mark.line == value.end_mark.line  # a block's comment is beside its key
        end = value.end_mark if is_one_line else key_node.end_mark
        line = lines[end.line]
        comment = line[end.column :].partition("#")[2].strip()
        default = None if is_section else _text(value)
        choices = ("true", "false") if default in ("true", "false") else ()
        yield Key(f"{section}.{key}", default, comment, choices)
        if is_section:
            yield from _yaml_keys(value, f"{section}.{key}", lines)


def _is_section(node: Node) -> bool:
    return isinstance(node, MappingNode) and not node.flow_style


def _text(node: Node) -> str:
    """Return a value with its numbers as they are written in the file: 1e-3."""
    if isinstance(node, ScalarNode) and node.tag.endswith(":null"):
        return "null"
    return _typed(BaseConstructor().construct_document(node))


def _words(node: Node, key: str) -> Iterator[str]:
    if not _is_section(node):
        yield f"{key}={_text(node)}"
    for name, value in _items(node) if _is_section(node) else ():
        yield from _words(value, f"{key}.{name}")


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return str(value) if value != "" else "''"


def _choices(kind: Any) -> tuple[str, ...]:
    members = get_args(kind) or (kind,)
    chosen: list[str] = []
    for member in members:
        if member is bool:
            chosen += ["true", "false"]
        elif isinstance(member, type) and issubclass(member, Enum):
            chosen += [item.name for item in member]
    return (*chosen, "null") if chosen and type(None) in members else tuple(chosen)
