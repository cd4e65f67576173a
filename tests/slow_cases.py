"""Tables of cases of which some are slow tests."""

from collections.abc import Collection, Iterable

import pytest


def with_slow(names: Iterable[str], slow: Collection[str]) -> list:
    """The cases of a table, for ``pytest.mark.parametrize``; those in ``slow`` are left to ``pytest -m slow``."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def slow(*values):
    """A case that is left to ``pytest -m slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)
