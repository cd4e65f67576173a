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
        default: The default as it is typed; None for a section.
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
        word: The option as it is typed, such as "model=gpt2".
        about: The comment at the top of its file, line by line.
        keys: The keys of its section.
        sets: The other keys that it sets, such as "data" to torch_docs and "train.steps" to 18.
        recipes: The names of its recipes.
        schema: The name of its schema in ``conf.schema.SCHEMAS``; None if the file itself lists the keys.
    """

    word: str
    about: str
    keys: Sequence[Key]
    sets: Sequence[Key]
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
    """Read an option of a group from its file."""
    text = file.read_text(encoding="utf-8")
    head, is_global = re.findall(r"\A(?:#.*\n)*", text)[0].splitlines(), "\n# @package _global_\n" in f"\n{text}"
    about = "\n".join(line[2:] for line in head if not line.startswith("# @package"))
    section = (_SECTIONS.get(group, group) or "").format(name)
    content, listed = _content(text), _yaml_keys(text, "" if is_global else section)
    keys = [key for key in listed if key.name.startswith(f"{section}.")]
    sets, schema = [], None
    for item in content.get("defaults") or ():
        [(place, chosen)] = item.items() if isinstance(item, dict) else [(str(item), "")]
        word, _, where = place.partition("@")
        if place.startswith("override /"):
            sets.append(Key(place.removeprefix("override /"), _typed(chosen), ""))
        elif word.startswith("/schema/"):
            schema = word.removeprefix("/schema/")
            of_schema = schema_keys(SCHEMAS[schema], group)
            keys = _over(of_schema, keys)[: len(of_schema)]
        elif where == "_here_" and not word.startswith("/"):  # it extends ``device@_here_: a100`` or ``a100@_here_``
            there = (Path(at, word, str(chosen)) for at in (file.parent, FOLDER / groups()[group]))
            files = (path.with_name(f"{path.name}.yaml") for path in there)
            if extended := next(filter(Path.is_file, files), None):  # composing says what is missing, and helps
                keys = _over(read_option(group, extended.stem, extended).keys, keys)
    if is_global:
        sets += [key for key in listed if key.default is not None and key not in keys]
    typed = f"callbacks=[{name}]" if group == "callbacks" else f"{group}={name}"
    return Option(typed, about, keys, sets, [*(content.get("recipes") or ())], schema)


def _over(keys: Sequence[Key], given: Sequence[Key]) -> list[Key]:
    """Return ``keys`` with the defaults and the meanings that ``given`` has, followed by the new keys of ``given``."""
    new = {key.name: key for key in given}
    both = [(key, new.pop(key.name, key)) for key in keys]
    return [replace(key, default=own.default, meaning=own.meaning or key.meaning) for key, own in both] + [
        *new.values()
    ]


def common_keys(section: str) -> list[Key]:
    """Return the keys of a group in conf/train.yaml, which every option of the group has in addition to its own."""
    listed = _yaml_keys((FOLDER / "train.yaml").read_text(encoding="utf-8"))
    return [key for key in listed if key.name.startswith(f"{section}.")]


def sections() -> dict[str, Any]:
    """Return the schemas of the sections without options, such as ``train``, by name."""
    return {name: node for name, node in get_type_hints(Root).items() if is_dataclass(node)}


@cache
def schema_keys(node: type, section: str = "") -> Sequence[Key]:
    """Return the keys of a schema for the section ``section``, without keys that are sections or groups."""
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
    """Return the docstring of a schema as one line."""
    return " ".join((node.__doc__ or "").replace("``", "").split())


def resolved(keys: Sequence[Key], words: Sequence[str]) -> list[Key]:
    """Return the keys. A default that refers to other keys is replaced by its value after ``words``."""
    # What comes from the environment may be secret, and may be missing.
    refer = [key for key in keys if "${" in (key.default or "") and "oc.env" not in str(key.default)]
    cfg: Any = _composed(*words) if refer else None
    return [replace(key, default=_typed(OmegaConf.select(cfg, key.name))) if key in refer else key for key in keys]


@cache
def _composed(*words: str) -> Any:
    return compose(words)


def _content(text: str) -> dict[str, Any]:
    """Return the keys of a YAML file with numbers as they are written: 1e-3."""
    content = yaml.load(text, yaml.BaseLoader)
    return content if isinstance(content, dict) else {}


def _yaml_keys(text: str, section: str = "") -> list[Key]:
    """Return the keys of a YAML file with the content of ``section``. The keys of a nested section follow it."""
    comments, path = {}, []
    for margin, key, comment in re.findall(r"^( *)([\w.-]+):.*?(?:\s#(.*))?$", text, re.M):
        path = [*(outer for outer in path if outer[0] < len(margin)), (len(margin), key)]
        comments[".".join(key for _, key in path)] = comment.strip()
    blocks = {place.rpartition(".")[0] for place in comments}

    def walk(tree: dict[str, Any], path: str) -> Iterator[Key]:
        for name, value in tree.items():
            place = f"{path}{name}"
            if name in _NOT_LISTED:
                continue
            default = None if isinstance(value, dict) and place in blocks else _typed(value)
            choices = ("true", "false") if default in ("true", "false") else ()
            yield Key(f"{section}.{place}".lstrip("."), default, comments.get(place, ""), choices)
            if default is None:
                yield from walk(value, f"{place}.")

    return list(walk(_content(text), ""))


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
