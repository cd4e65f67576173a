"""Trainings under many layouts; one that several tests look at runs once."""

import pytest
from cases import trainings


@pytest.fixture(scope="session")
def trained(ranks):
    """``trained(layout, recipe)``: a list of what each rank saw (``cases.Result``)."""
    return trainings(ranks)
