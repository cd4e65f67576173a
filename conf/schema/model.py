"""The ``model=`` options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydra.core.config_store import ConfigStore


@dataclass
class Toy:
    _target_: str = "models.toy.toy"
    name: str = "toy"
    in_features: int = 10
    hidden: int = 10
    out_features: int = 5


Size = Enum("Size", {size: size for size in ("124M", "350M", "774M", "1558M", "tiny")})


@dataclass
class GPT2:
    _target_: str = "models.gpt2.gpt2"
    name: str = "gpt2"
    size: Size = Size["124M"]
    n_layer: int | None = None  # these four: null takes the size's own
    n_head: int | None = None
    n_embd: int | None = None
    block_size: int | None = None  # positions: the longest sequence, in tokens
    vocab_size: int = 50304  # 50257 is GPT-2's own; padded to a multiple of 128 it is faster on every device
    dropout: float = 0.0


def register(store: ConfigStore) -> None:
    for name, node in {"toy": Toy, "gpt2": GPT2}.items():
        store.store(group="schema/model", name=name, node=node)
