"""Typed schema of every config group: a wrong key or a wrong type is an error before anything starts."""

from hydra.core.config_store import ConfigStore

from conf.schema import data, launcher, logger, model, optim, parallel, root, scheduler


def register() -> None:
    """Put all schemas into Hydra's ConfigStore, under the group ``schema``; conf/*.yaml pull them in from there."""
    store = ConfigStore.instance()
    for group in (root, model, data, parallel, optim, scheduler, logger, launcher):
        group.register(store)
