"""The configuration: Hydra's groups as YAML files, and the words of a command line that chooses among them.

An option of a group is a file ``conf/GROUP/OPTION.yaml``. Everything that lists, tests or measures options asks
``options`` for them, so that a new file is all that a new option needs. The words of a command line go from what a user
types to what Hydra takes, and back; without Hydra, which the ranks that record a command need not import.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from common.errors import UserError
from common.files import expand_home

FOLDER = Path(__file__).resolve().parent
# The sections that say what is trained, as the seed does; the others say where. A checkpoint keeps these.
TRAINED = ("model", "data", "optim", "scheduler", "train")
# The groups whose option says what is trained, and those whose values are changes of the others' defaults.
CHOSEN, ON_TOP = ("model", "data", "optim", "scheduler"), ("experiment", "debug")
# Keys that the program reads itself and does not pass to the section's target (conf/train.yaml says what they mean).
_OWN_KEYS = {
    "model": {"name", "init_from", "loss", "vocabulary", "extra_tokens"},
    "optim": {"decay_vectors", "rates", "update", "others"},
}
# The key of a plain configuration under which it says how it was composed (conf.composition.composed_by).
COMMAND = "command"
GROUPS = (*CHOSEN, "parallel", "launcher", "logger")  # of which a run needs an option each
_HYDRA_OPTIONS = (
    "--help --hydra-help --version --cfg --resolve --package --run --multirun --shell-completion --config-path "
    "--config-name --config-dir --info"
).split()


def options(group: str) -> list[str]:
    """Return the names of a group's options, such as ``["classifier", "convnet", ...]`` for ``"model"``, sorted."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def own_keys(group: str) -> set[str]:
    """Return the keys of a section that are not arguments of its target."""
    return _OWN_KEYS.get(group, set())


def help_page() -> str:
    """Return the page that ``python train.py --help`` prints: conf/help.txt with the options of each group."""
    groups = [path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "hydra"]
    page = Template((FOLDER / "help.txt").read_text(encoding="utf-8"))
    return page.substitute({group: _in_lines(options(group)) for group in groups})


def _in_lines(names: list[str], width: int = 100) -> str:
    return textwrap.fill(" | ".join(names), width, subsequent_indent=" " * 14, break_long_words=False)


# -- the words of a command line ---------------------------------------------------------------------------------------


def literal(node: Any) -> Any:
    """Return a copy of plain data in which OmegaConf takes no text for an interpolation."""
    if isinstance(node, dict):
        return {key: literal(item) for key, item in node.items()}
    if isinstance(node, list):
        return [literal(item) for item in node]
    return re.sub(r"(?<!\\)(\\*)\$\{", r"\1\1\${", node) if isinstance(node, str) else node


def typed_overrides(hydra: Any) -> list[str]:
    """Return what the user typed for a job, with its interpolations as they are: a value may be secret, or missing."""
    from omegaconf import OmegaConf

    return as_typed(OmegaConf.to_container(hydra.overrides, resolve=False)["task"])


def config_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the user's own options, ``--config-dir``; None where there is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(list(arguments))[0].config_dir
    return None if folder is None else expand_home(folder).absolute()


def code_folders(arguments: Sequence[str]) -> list[str]:
    """Return where code of the user's own may be: the folder of ``--config-dir``, and the one that it is in."""
    folder = config_folder(arguments)
    return [] if folder is None else [str(folder.parent), str(folder)]


def is_override(word: str) -> bool:
    """Return whether a word of a command line is no option, such as ``-m``."""
    return "=" in word and not word.startswith("-")


def key_of(word: str) -> str:
    """Return the key of an override, or the group of an option: of ``+a.b=1`` and of ``logger@loggers.csv=csv``."""
    return re.split(r"[=@]", word.lstrip("+~"))[0]


def check_dashes(arguments: Sequence[str]) -> None:
    """Raise UserError where a setting is written with dashes."""
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option.startswith("--") and not any(known.startswith(option) for known in _HYDRA_OPTIONS):
            setting = argument[2:] if equals else f"{argument[2:]}=VALUE"
            raise UserError(f"{argument}: settings are written without dashes: {setting}")


def expand_lists(arguments: Sequence[str]) -> list[str]:
    """``logger=[wandb,csv]`` and ``callbacks=[early_stop]`` as options of their groups, each in a section of its own.

    The first logger is the section ``logger``, the others ``loggers.NAME``; callbacks are ``callbacks.NAME``.
    ``experiment=null`` is none, which Hydra writes as ``~experiment``.

    Raises:
        UserError: A group that a run needs is null.
    """
    return [word for argument in arguments for word in _expand(argument)]


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Return what was typed, of the overrides that Hydra was given: the reverse of what this module does to words."""
    overrides = [f"{word[1:]}=null" if word[1:] in ON_TOP and word[0] == "~" else word for word in overrides]
    # In prompts a reference is text, for which OmegaConf wants a backslash.
    overrides = [_refer(word) if re.match(r"\+*sample[.=]", word) else word for word in overrides]
    words: list[str] = []
    names: dict[str, list[str]] = {"logger": [], "callbacks": []}
    for override in overrides:
        added = re.fullmatch(r"\+(logger|callback)@(?:loggers|callbacks)\.[\w-]+=([\w-]+)", override)
        if added is None:
            words.append(override)
        else:
            names["logger" if added[1] == "logger" else "callbacks"].append(added[2])
    if names["logger"]:
        first = next((word.partition("=")[2] for word in words if word.startswith("logger=")), "wandb")
        words = [word for word in words if not word.startswith("logger=")]
        names["logger"].insert(0, first)
    return [*words, *(f"{key}=[{','.join(some)}]" for key, some in names.items() if some)]


def _refer(word: str) -> str:
    return re.sub(r"(?<!\\)(\\+)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", word)


def _expand(argument: str) -> list[str]:
    group, _, option = argument.partition("=")
    if option == "null" and group in ON_TOP:
        return [f"~{group}"]
    if option == "null" and group in GROUPS:
        none = ", such as logger=none for none" if group == "logger" else ""
        raise UserError(f"{argument}: a run needs this section; leave it out or choose {group}=NAME{none}")
    match = re.fullmatch(r"(logger|callbacks)=(?:\[([\w,\s-]*)\]|([\w-]+))", argument)
    if match is None or argument in ("callbacks=null", "callbacks=[]") or (match[1] == "logger" and match[3]):
        return [argument]
    names = re.findall(r"[\w-]+", match[2] or match[3] or "") or ["none"]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{argument} names {repeated[0]} {names.count(repeated[0])} times; name each once")
    group, section = ("logger", "loggers") if match[1] == "logger" else ("callback", "callbacks")
    first = [f"logger={names.pop(0)}"] if group == "logger" else []
    return first + [f"+{group}@{section}.{name}={name}" for name in names]


def hydra_word(text: str) -> str:
    """Return ``text`` as the value of a command-line override: quoted, unless it is a plain word or path."""
    return text if re.fullmatch(r"[\w./:%@+-]+", text) else quoted(text)


def quoted(text: str) -> str:
    """Return ``text`` quoted for Hydra's grammar, in which a backslash escapes a quote and those before a quote."""
    escaped = re.sub(r"(?<!\\)(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def quote_values(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with those values quoted that Hydra's grammar would misread.

    ``sample.prompt=...`` is any text, unless the user has quoted it. ``sample.prompts=...`` is JSON, a list of texts.
    ``${`` in a prompt is text.
    ``model.extra_tokens=...`` is JSON, ``{"<a>": "start of an entity"}``: Hydra's own mappings cannot have such keys.
    """
    return [_quote_value(argument) for argument in arguments]


def _quote_value(argument: str) -> str:
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if name == "sample.prompt" and equals:
        return f"{key}={literal(value) if is_quoted else quoted(literal(value))}"
    content = _json(value) if name in ("sample.prompts", "model.extra_tokens") else None
    if isinstance(content, dict):
        return f"{key}={quoted(value)}"
    if isinstance(content, list) and all(isinstance(item, str) for item in content):
        return f"{key}=[{','.join(quoted(literal(item)) for item in content)}]"
    if name in ("sample", "sample.prompts") and "${" in value:
        return f"{key}={_prompts(_parsed(argument))}"
    return argument


def _parsed(override: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override).value()


def _prompts(value: Any) -> str:
    """Return what Hydra has read, as words for Hydra in which a text is never an interpolation."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_prompts(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_prompts, value))}]"
    return quoted(literal(value)) if isinstance(value, str) else "null" if value is None else str(value)


def _json(value: str) -> Any:
    """Return what JSON text means; None where it is something else."""
    try:
        return json.loads(value)
    except ValueError:
        return None
