"""Trainings under many layouts; one that several tests look at runs once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``cases`` and ``probes``, here and on the ranks


@pytest.fixture(scope="session")
def trained(ranks):
    """``trained(layout, recipe)``: a list of what each rank saw (``cases.Result``)."""
    from cases import trainings

    return trainings(ranks)
