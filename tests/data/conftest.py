"""What the tests of the data sets share."""

from __future__ import annotations

from pathlib import Path

import pytest

# Data that is not part of the repository.
PUBLISHED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def prepared(cache):
    """Builds a data set, with a cache of the test's own, and prepares it."""

    def build(kind, root=None, **options):
        if root is not None:
            options["root"] = str(root)
        data = kind(cache_dir=str(cache), **options)
        data.prepare()
        return data

    return build


@pytest.fixture
def published():
    """Where a published data set lies beside the repository; skips the test where it does not."""

    def find(name: str) -> Path:
        if not (PUBLISHED / name).is_dir():
            pytest.skip(f"needs the published {name} (docs/data.md), which this repository does not contain")
        return PUBLISHED / name

    return find
