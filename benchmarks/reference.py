"""The page docs/reference.md: every key of the configuration, from the comments that ``train.py --help`` prints.

    python -m benchmarks reference

writes it.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.table import Benchmark, Table
from conf import FOLDER, keys
from conf.keys import Key, Option
from conf.schema import SCHEMAS, Root

PAGE = FOLDER.parent / "docs" / "reference.md"
_ORDER = ("model", "data", "optim", "scheduler", "parallel", "cluster", "launcher", "logger", "callbacks")
_HEAD = """# Every key

This page lists every key of the configuration with its default and its meaning. `python train.py --help SECTION` prints
the same in a shell:

    python train.py --help train                 # a section
    python train.py --help model                 # the options of a group
    python train.py --help model=gpt2            # an option and its keys
    python train.py --help parallel.chunks       # a key

Type a key as `SECTION.KEY=VALUE`. If a default depends on other keys, the table shows its value in a command that names
only this option; `python train.py … --cfg job` prints the values of a whole command. `python -m benchmarks reference`
writes this page from the comments in `conf/`.
"""


def update(chosen: Namespace) -> Iterable[Table]:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return ()


def page() -> str:
    """Return the text of docs/reference.md."""
    parts = [_HEAD, "## Keys without a section\n", _keys(keys.schema_keys(Root))]
    for name, node in keys.sections().items():
        parts += [f"## {name}\n", f"{_escaped(keys.described(node))}\n", _keys(keys.schema_keys(node, name))]
    ordered = [*_ORDER, *(group for group in keys.groups() if group not in _ORDER)]
    for group in ordered:
        parts += _group(group, keys.read_options(group))
    return "\n".join(parts)


def _group(group: str, options: Sequence[Option]) -> Iterator[str]:
    yield f"## {group}\n"
    sets = {option.word: _sets(option) for option in options}
    columns = ("type", "to get", "which also sets") if any(sets.values()) else ("type", "to get")
    rows = [(f"`{option.word}`", _escaped(option.summary), sets[option.word])[: len(columns)] for option in options]
    yield _table(columns, rows)
    for path in dict.fromkeys(option.schema for option in options if option.schema):
        title = f"### {path.replace('/', '=')}\n\n" if "/" in path else ""
        yield f"{title}{_escaped(keys.described(SCHEMAS[path]))}\n"
        yield _keys(keys.schema_keys(SCHEMAS[path], group))
    if common := keys.common_keys(group):
        yield f"Every `{group}` has these keys in addition to its own:\n"
        yield _keys(common)
    for option in options:
        if option.keys and not option.schema:
            yield f"### {option.word}\n\n{_escaped(option.about)}\n"
            yield _keys(keys.resolved(option.keys, [option.word]))


def _sets(option: Option) -> str:
    """Return the words that an option sets: keys of other sections, or values that differ from those of its schema."""
    if option.schema is None:
        differing = keys.resolved(option.sets, [option.word])
    else:
        defaults = keys.schema_keys(SCHEMAS[option.schema], option.word.partition("=")[0])
        differing = [key for key, default in zip(option.keys, defaults, strict=True) if key.default != default.default]
        differing = [key for key in differing if not key.name.endswith(".name")]
    words = [f"{key.name}={key.default}" for key in differing]
    return f"`{' '.join(words)}`" if words else ""


def _keys(listed: Sequence[Key]) -> str:
    return _table(("key", "default", "meaning"), [(f"`{key.name}`", _default(key), _meaning(key)) for key in listed])


def _default(key: Key) -> str:
    return "" if key.default is None else f"`{key.default}`"


def _meaning(key: Key) -> str:
    choices = ", ".join(f"`{choice}`" for choice in key.choices)
    return f"{_escaped(key.meaning)} ({choices})" if choices else _escaped(key.meaning)


def _escaped(text: str) -> str:
    """Return text as Markdown shows it. What is in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part[:1] == "`" else re.sub(r"([_*|<\\])", _character, part) for part in parts)


def _character(match: re.Match) -> str:
    return "&lt;" if match[1] == "<" else f"\\{match[1]}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


BENCHMARK = Benchmark(update)
