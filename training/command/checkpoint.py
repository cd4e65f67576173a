"""The checkpoint that a command names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.checkpoint.configuration import SavedConfig


def saved_config(arguments: Sequence[str]) -> SavedConfig | None:
    """See ``training.checkpoint.configuration.saved_config``, which is imported only where a checkpoint is named."""
    if not any(re.match(r"\+*(checkpoint|train\.resume)=", argument) for argument in arguments):
        return None
    from training.checkpoint import configuration

    return configuration.saved_config(arguments)
