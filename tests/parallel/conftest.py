"""Trainings under many layouts; one that several tests look at runs once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``cases`` and ``probes``, here and on the ranks


@pytest.fixture(scope="session")
def trained(ranks):
    """``trained(layout, recipe)``: a list of what each rank saw (``cases.Result``)."""
    from cases import train

    known = {}

    def run(layout, recipe):
        if (layout, recipe) not in known:
            known[layout, recipe] = ranks.run(layout.ranks, train, layout, recipe)
        return known[layout, recipe]

    return run
