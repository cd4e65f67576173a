"""The keys of a section are the parameters of what it builds: read from the source, the same as Python's own."""

import inspect
from enum import Enum
from importlib import import_module

import pytest
from omegaconf import OmegaConf

from conf import FOLDER, options
from conf.messages import explain
from conf.schema import TARGET_GROUPS
from conf.signatures import parameters


def target_of(group, option):
    tree = OmegaConf.load(FOLDER / group / f"{option}.yaml")
    return (tree.model if group == "model" else tree)._target_


TARGETS = [target_of(group, option) for group in TARGET_GROUPS for option in options(group)]
OPTIMIZERS = [f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor")]


def signature(target):
    """Names and defaults; a class that passes ``**options`` on has those of its base class as well."""
    module, _, name = target.rpartition(".")
    kind, found = getattr(import_module(module), name), {}
    for one in inspect.getmro(kind) if inspect.isclass(kind) else (kind,):
        if inspect.isclass(one) and "__init__" not in vars(one):
            continue
        own = inspect.signature(one.__init__ if inspect.isclass(one) else one).parameters.values()
        found = {p.name: p.default for p in own if p.name not in ("self", "args", "kwargs", "options")} | found
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


@pytest.mark.parametrize("target", [*TARGETS, *OPTIMIZERS])
def test_parameters_and_defaults_are_those_of_the_signature(target):
    read, real = {p.name: p.default for p in parameters(target)}, signature(target)
    assert set(read) == set(real)
    for name, value in read.items():
        if real[name] is not inspect.Parameter.empty:
            plain = value.value if isinstance(value, Enum) else value
            assert plain == (list(real[name]) if isinstance(real[name], tuple) else real[name]), name


def test_annotations_become_types_that_omegaconf_checks():
    kinds = {p.name: p.kind for p in parameters("torch.optim.AdamW")}
    assert (kinds["lr"], kinds["betas"], kinds["amsgrad"], kinds["fused"]) == (float, list[float], bool, bool | None)
    size, *numbers = parameters("models.gpt2.gpt2")
    assert list(size.kind.__members__) == ["124M", "350M", "774M", "1558M", "tiny"]
    assert {p.name: p.kind for p in numbers}["n_layer"] == int | None


@pytest.mark.parametrize("target", ["torch.optim.Nothing", "nowhere.at.all", "torch.optim", "math.sqrt"])
def test_what_has_no_source_has_no_parameters(target):
    assert parameters(target) is None


def test_an_error_of_the_program_is_not_explained():
    assert explain(KeyError("x")) is None
