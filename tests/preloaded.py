"""What the ranks and the runs of the command line import, six seconds' work: once, in the process that forks them."""

import gc
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from pickle import dumps, loads  # test_safety closes those of the module

import hydra.main  # noqa: F401
import omegaconf._utils
import omegaconf.base
import pytest  # noqa: F401
import torch
import torch.distributed.pipelining  # noqa: F401
import wandb  # noqa: F401
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.sources_registry import SourcesRegistry

import conf
import training.command.app
import training.command.modes.export
import training.command.modes.sample
import training.command.modes.train
import training.run.rank  # noqa: F401
from common.errors import UserError
from common.packages import load_transformers
from conf.composition import compose

OWN = ("hydra.conf", str(Path(conf.__file__).parent))
# The references of a configuration are the same in each composition; to parse them again took a quarter of its time.
omegaconf.base.parse = omegaconf._utils.parse = cache(omegaconf.base.parse)


def parsed_once(load):
    """A source of Hydra's parses each of its files once, until it changes: the parsing took a quarter of the time."""
    known = {}

    def load_config(self, config_path):
        file = Path(self.path, self._normalize_file_name(config_path))  # a package has no such file, and never changes
        changed = file.stat().st_mtime_ns if file.exists() else None
        key = type(self), self.path, config_path, changed
        if key not in known:
            known[key] = dumps(load(self, config_path))
        return loads(known[key])

    return load_config


def map_of_choices(*given, make=defaults_list._create_interpolation_map):
    """What the names in a list of defaults may refer to; for a list in which none does it took a fifth of the time."""
    return make(*given) if any(default.is_interpolation() for default in given[1]) else None


defaults_list._create_interpolation_map = map_of_choices


def of_the_project(repo):
    """Whether a composition reads the files of this project alone, which do not change while the tests run."""
    return all(not one.path or one.path.rstrip("/") in OWN for one in repo.get_sources())


def listed_once(create):
    """What Hydra composes of follows from the options that are chosen: half of the time, for each key that is typed."""
    known = {}

    def listed(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        keys = defaults_list.Overrides(repo, overrides_list).config_overrides
        words = [override.input_line for override in overrides_list if override not in keys]
        chosen = config_name, prepend_hydra, skip_missing, *words
        if not of_the_project(repo):
            return create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        if chosen not in known:
            known[chosen] = create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        return replace(known[chosen], config_overrides=keys)

    return listed


def merged_once(merge):
    """So does what it makes of their files, before keys are set in it."""
    known = {}

    def merged(self, defaults, repo):
        if not of_the_project(repo):
            return merge(self, defaults, repo)
        if (key := repr(defaults)) not in known:
            known[key] = dumps(merge(self, defaults, repo))
        return loads(known[key])

    return merged


config_loader_impl.create_defaults_list = listed_once(config_loader_impl.create_defaults_list)
loader = config_loader_impl.ConfigLoaderImpl
loader._compose_config_from_defaults_list = merged_once(loader._compose_config_from_defaults_list)
compose([])  # Hydra looks for its plug-ins
for source in map(SourcesRegistry.instance().resolve, ("file", "pkg")):
    source.load_config = parsed_once(source.load_config)
# The first shape that is inferred has torch import sympy.
with torch.device("meta"):
    torch.nn.functional.mse_loss(torch.nn.Linear(2, 2)(torch.empty(2, 2)), torch.empty(2, 2))
# The first model that it builds has transformers import half of itself.
with suppress(UserError), torch.device("meta"):
    transformers = load_transformers()
    small = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.AutoModelForCausalLM.from_config(small)
# What was imported stays: to look through those 400,000 objects for garbage, again and again, took a sixth of the time.
gc.freeze()
gc.set_threshold(100_000, 50, 100)
