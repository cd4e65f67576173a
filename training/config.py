"""Configurations as plain data: workers have no Hydra, and files no types."""

from __future__ import annotations

from typing import Any

from common.errors import PlanError


def to_dict(cfg: Any) -> dict:
    """A dict of dicts, lists, numbers and words, interpolations resolved, enum members by name."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(cfg):
        cfg = OmegaConf.create(cfg)
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)


def to_config(tree: dict) -> Any:
    """The reverse, for reading: ``cfg.train.steps`` over plain data."""
    from omegaconf import OmegaConf

    return OmegaConf.create(tree)


def environment(cfg: Any) -> dict[str, str]:
    """The variables of ``parallel.env``, such as {"NCCL_DEBUG": "INFO"}. Raises PlanError where it is no mapping."""
    wanted = cfg.parallel.env or {}
    if not hasattr(wanted, "items"):
        raise PlanError(f"parallel.env={wanted} must be a mapping, such as parallel.env={{NCCL_DEBUG: INFO}}")
    return {str(name): str(value) for name, value in wanted.items()}
