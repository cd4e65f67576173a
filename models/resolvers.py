"""Functions that a model's YAML file may apply to a section ``model``: ``${NAME:${model}}``."""

from collections.abc import Callable, Mapping
from typing import Any

from models.gpt2_sizes import published_rate, with_defaults

RESOLVERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "gpt2_parameters": lambda model: with_defaults(model).parameters,
    "gpt2_rate": lambda model: published_rate(with_defaults(model).parameters),
}
