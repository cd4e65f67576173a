"""The output of ``python train.py --help``: one page, or an explanation of each further word.

``--help parallel`` explains a section or a group, ``--help model=gpt2`` an option and ``--help train.steps`` a key.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from string import Template

from common.errors import UserError
from conf import FOLDER, MODES, keys, masking, options
from conf.keys import Key, Option
from conf.messages import nearest, unknown_key
from conf.schema import SCHEMAS, Root
from conf.words import config_folder, key_of, parse

_WIDTH, _COLUMN = 120, 42


def answer(arguments: Sequence[str]) -> str:
    """Return the help for a command line with ``--help``.

    Raises:
        UserError: A word names nothing that exists.
    """
    words, folder = parse(arguments).overrides, config_folder(arguments)
    if not words:
        return page()
    folders = [FOLDER] if folder is None else [FOLDER, folder]
    return masking.hide("\n".join(_explained(word, folders) for word in words))


def page() -> str:
    """Return the page with all groups and the most used keys: conf/help.txt with the options of each group."""
    text = Template((FOLDER / "help.txt").read_text(encoding="utf-8"))
    listed = {group: _wrapped(" | ".join(options(group)), 14, _WIDTH - 1).lstrip() for group in keys.groups().values()}
    return text.substitute(listed, mode="|".join(MODES))


def _explained(word: str, folders: Sequence[Path]) -> str:
    name, value = key_of(word), word.partition("=")[2]
    if name in keys.groups() and value:
        return "\n".join(_option(_found(name, option, folders), folders) for option in re.findall(r"[\w-]+", value))
    return (_section if name in keys.sections() or name in keys.groups() else _key)(name, folders)


def _section(name: str, folders: Sequence[Path]) -> str:
    """Explain a section or a group."""
    parts = [f"{title}\n\n{_listed(listed)}" for title, option, listed in _tables(name, folders) if not option]
    if name in keys.groups():
        found = keys.read_options(name, folders)
        options = _table([(option.word, option.summary) for option in found])
        parts.insert(0, f"Options of {name} (python train.py --help {found[0].word} explains one):\n\n{options}")
    return "\n".join(parts)


def _tables(section: str, folders: Sequence[Path]) -> Iterator[tuple[str, Option | None, Sequence[Key]]]:
    """Yield (title, option, keys) of a section or of the root. The option is None if several options have the keys."""
    if section in keys.sections():
        node = keys.sections()[section]
        yield f"{section}: {keys.described(node)}", None, keys.schema_keys(node, section)
    elif section in keys.groups():
        found = keys.read_options(section, folders)
        for path in dict.fromkeys(option.schema for option in found if option.schema):
            node = SCHEMAS[path]
            yield f"{path.replace('/', '=')}: {keys.described(node)}", None, keys.schema_keys(node, section)
        if common := keys.common_keys(section):
            yield f"Keys of every {section}:", None, common
        yield from ((option.word, option, option.keys) for option in found if not option.schema)
    else:
        yield "", None, keys.schema_keys(Root)


def _option(option: Option, folders: Sequence[Path]) -> str:
    words, section = _words(option, folders), option.word.partition("=")[0]
    lines = [f"{option.word}\n{textwrap.indent(option.about, '  ')}\n"]
    if option.sets:
        sets = (f"{key.name}={key.default}" for key in keys.resolved(option.sets, words))
        lines += ["\nSets:\n\n", _wrapped(" ".join(sets), 2), "\n"]
    if option.recipes:
        lines += [f"\nRecipes: {', '.join(f'recipe={name}' for name in option.recipes)}\n"]
    if option.keys:
        lines += ["\nKeys:\n\n", _listed(keys.resolved(option.keys, words))]
    if common := [key for key in keys.common_keys(section) if key.name not in {own.name for own in option.keys}]:
        lines += [f"\nKeys of every {section}:\n\n", _listed(common)]
    return "".join(lines)


def _key(name: str, folders: Sequence[Path]) -> str:
    """Explain a key, or a section of an option such as ``model.lora``, wherever it occurs."""
    (section, dot, _), known, texts = name.partition("."), [], []
    for title, option, listed in _tables(section, folders):
        known += [key.name.removeprefix(f"{section}.") for key in listed]
        if named := [key for key in listed if f"{key.name}.".startswith(f"{name}.")]:
            text = _listed(keys.resolved(named, _words(option, folders)) if option else named)
            texts.append(f"{title}\n{text}" if option else text)
    if texts:
        return "\n".join(texts)
    if dot and known:
        raise UserError(unknown_key(name, list(dict.fromkeys(known))))
    raise UserError(_unknown(name, folders))


def _unknown(name: str, folders: Sequence[Path]) -> str:
    sections = [*keys.sections(), *keys.groups()]
    typed = {option: f"{group}={option}" for group in keys.groups() for option in keys.files(group, folders)}
    typed |= {key: key for key in (*sections, *(key.name for key in keys.schema_keys(Root)))}
    guess = " or ".join(typed[match] for match in get_close_matches(name, typed, n=2, cutoff=0.7))
    known = f"Sections: {', '.join(sorted(sections))}"
    return f"there is no {name} to explain{f'; did you mean {guess}? {known}' if guess else f'. {known}'}"


def _found(group: str, name: str, folders: Sequence[Path]) -> Option:
    files = keys.files(group, folders)
    if name not in files:
        raise UserError(f"there is no {group}={name}{nearest(f'{group}={{}}', name, list(files))}")
    return keys.read_option(group, name, files[name])


def _words(option: Option, folders: Sequence[Path]) -> list[str]:
    return [*(f"--config-dir={folder}" for folder in folders[1:]), option.word]


def _listed(listed: Sequence[Key]) -> str:
    return _table([(f"{key.name}{'' if key.default is None else f'={key.default}'}", _meaning(key)) for key in listed])


def _meaning(key: Key) -> str:
    return f"{key.meaning} ({' | '.join(key.choices)})" if key.choices else key.meaning


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of two columns. If a left cell is too wide, the right cell begins on the next line."""
    column = min(_COLUMN, max(len(left) for left, _ in rows) + 4)
    lines = []
    for left, text in rows:
        wrapped = _wrapped(text, column)
        lines.append(f"  {left:{column - 2}}{wrapped.lstrip()}" if len(left) + 4 <= column else f"  {left}\n{wrapped}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _wrapped(text: str, indent: int, width: int = _WIDTH) -> str:
    margin = " " * indent
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
