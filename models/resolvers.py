"""Functions that a model's YAML file may apply to a section ``model``: ``${NAME:${model}}``."""

from collections.abc import Callable, Mapping
from typing import Any

from models import gpt2_sizes

RESOLVERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "gpt2_parameters": gpt2_sizes.parameters_of,
    "gpt2_rate": lambda model: gpt2_sizes.published_rate(gpt2_sizes.parameters_of(model)),
}
