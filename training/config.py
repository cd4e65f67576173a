"""Configurations as plain data: workers have no Hydra, and files no types."""

from __future__ import annotations

from typing import Any


def plain(cfg: Any) -> dict:
    """A dict of dicts, lists, numbers and words, interpolations resolved, enum members by name."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(cfg):
        cfg = OmegaConf.create(cfg)
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)


def attributes(tree: dict) -> Any:
    """The reverse, for reading: ``cfg.train.steps`` over plain data."""
    from omegaconf import OmegaConf

    return OmegaConf.create(tree)
