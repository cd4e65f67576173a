"""Builds the objects of a run from its configuration, and checks everything that can be checked before it starts."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from common.errors import TrainingError, exit_is_failure
from conf import LORA, OWN_KEYS
from conf.instantiate import (
    build,
    checked_arguments,
    environment,
    in_section,
    instantiate,
    target_of,
    to_dict,
    use_code_of,
    with_values,
)
from conf.schema import Root
from data.dataset import DataSet
from data.jsonl import RowData
from data.mixture import Mixture, in_part
from launchers import World, call_in_workers
from launchers.heartbeat import note
from models.chain import ONE_LAYER, Chain, aliases
from models.given import pack_given, unpack_given
from models.lora import adapt
from models.losses import TokenCrossEntropy
from models.preference import NAME, prefer
from models.sequential import chain_of_module
from parallel.devices import Hardware, share_cores
from parallel.late_imports import import_compiler_late
from parallel.layout import Layout
from parallel.plan import Plan
from parallel.planning import make_plan, rebalanced
from planner.balance import equal_stages, seconds_per_layer, stage_shares
from planner.memory import Rank
from training.callbacks.averaging import states_of_run
from training.checkpoint.init_from import unseen, vocabulary_with, with_base
from training.run.checks import order
from training.run.checks.model import across_nodes, check_kind, reads_weights, unreached
from training.run.setup import TERMS, Setup

BALANCES = ("time", "size")  # values of parallel.balance that are measured
_NAMES = ("targets", "modules_to_save")  # keys of model.lora that take a name or a list
_ALONE = ("export", "predict", "sample")  # modes that have a model without its reference


def adopt(cfg: Root, world: World) -> None:
    """Set up this process for a run: environment variables, code, cores and arithmetic."""
    os.environ.update(environment(cfg))
    use_code_of(cfg)
    share_cores(world.local_size, cfg.parallel.threads)
    set_arithmetic(cfg.train)


def set_arithmetic(train: Any) -> None:
    """Set torch's modes of computation: deterministic algorithms, TF32, the fastest algorithms of cuDNN."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != train.deterministic:  # an earlier run may have set it
        torch.use_deterministic_algorithms(train.deterministic)


@exit_is_failure()
def build_setup(cfg: Root, plan: Plan, world: World) -> Setup:
    """Build the objects of a run that another process has planned and checked; see ``prepare``."""
    adopt(cfg, world)
    if not cfg.train.compile:
        import_compiler_late()  # as in the process that has planned
    note(0, "preparing the data")
    cfg, chain, data = model_and_data(cfg)
    data.prepare()
    return Setup(cfg, chain, data, plan)


@dataclass(frozen=True)
class PlannedRun:
    """A run that one process has planned and checked, in the form that is sent to the program's other processes.

    Attributes:
        cfg: The configuration.
        plan: The plan.
        objects: The packed objects of a Python program; None without one.
    """

    cfg: Root
    plan: Plan
    objects: bytes | None = field(default_factory=pack_given)

    def setup(self, world: World) -> Setup:
        """Build the objects of the run in this process."""
        unpack_given(self.objects)
        return build_setup(self.cfg, self.plan, world)


def prepare(
    cfg: Root,
    world_size: int | None = None,
    nodes: int = 1,
    hardware: Hardware | None = None,
    like: Setup | None = None,
) -> Setup:
    """Build the chain and the plan, prepare the data, and check each as soon as it is built.

    Args:
        cfg: The configuration. In the result's configuration, measured values replace the values that request them.
        world_size: The number of processes if they have been started already (torchrun), otherwise None.
        nodes: The number of machines.
        hardware: The hardware of the machine that will execute the run and measure times; None for this machine.
        like: A run of the same model and data, whose objects are used again, and whose examination if its micro-batches
            have as many samples.

    Raises:
        UserError: The configuration cannot run. The message states the numbers and a fix.
    """
    cfg, chain, data = checked_model_and_data(cfg) if like is None else (cfg, like.chain, like.data)
    setup = Setup(cfg, chain, data, plan_of(cfg, chain, world_size, nodes, hardware), nodes)
    for check in order.OF_PLAN:
        check(setup)
    if like is None:
        note(0, "preparing the data")
        data.prepare()
    elif like.plan.microbatch_size == setup.plan.microbatch_size:
        setup.examination = like.examination
    note(0, "checking the run")
    for check in order.OF_RUN:
        check(setup)
    setup.plan = replace(setup.plan, **setup.examination.for_plan())
    if cfg.parallel.balance in BALANCES and len(setup.plan.stages) > 1:
        _balance(setup, world_size, hardware)
    return setup


def plan_of(
    cfg: Root, chain: Chain, world_size: int | None = None, nodes: int = 1, hardware: Hardware | None = None
) -> Plan:
    """Return the plan of a configuration; see ``make_plan``."""
    return make_plan(
        cfg.parallel,
        chain,
        global_batch_size=cfg.train.global_batch_size,
        device=cfg.device,
        precision=cfg.train.precision,
        recompute=cfg.train.activation_checkpointing,
        world_size=world_size,
        nodes=nodes,
        hardware=hardware,
    )


def checked_model_and_data(cfg: Root) -> tuple[Any, Chain, DataSet]:
    """Build the chain and the data, and check everything that does not depend on the layout. See ``model_and_data``."""
    for check in order.OF_WORDS:
        check(cfg)
    cfg, chain, data = model_and_data(cfg)
    for check in order.OF_MODEL:
        check(cfg, chain, data)
    return with_base(cfg, chain), chain, data


def in_one_process(cfg: Root) -> Any:
    """Return the configuration of the same training in one process."""
    return with_values(cfg, in_section("parallel", Layout().section()))


# -- balance ---------------------------------------------------------------------------------------------------------


def _balance(setup: Setup, world_size: int | None, hardware: Hardware | None) -> None:
    """Measure the cost of each layer, and divide the layers into stages of similar cost."""
    cfg, plan = setup.cfg, setup.plan
    if cfg.parallel.balance == "time":
        if hardware is not None:
            return  # the run's first rank will measure
        if plan.device_type == "cuda" and world_size is None and plan.processes > 1:
            # Use a separate process: this process would keep a context on a GPU that the run's ranks use.
            (costs,) = call_in_workers(_measure, (PlannedRun(cfg, plan),), 1)
        else:
            costs = seconds_of_layers(setup)
    else:
        states = states_of_run(cfg, setup.chain)
        costs = Rank.of_plan(plan, setup.work[0], states).each_layer()
    unit = "of the time" if cfg.parallel.balance == "time" else "of the memory"
    counts = equal_stages(costs, len(plan.stages), plan.pp, plan.chunks, plan.schedule)
    setup.cfg, setup.plan = with_values(cfg, {"parallel.balance": counts}), rebalanced(plan, setup.chain, counts)
    setup.shares = stage_shares(costs, [len(stage.layers) for stage in setup.plan.stages]), unit


def seconds_of_layers(setup: Setup) -> list[float]:
    """Measure the seconds of each layer of the model on this machine."""
    cfg = setup.cfg
    return seconds_per_layer(setup.plan, setup.chain, setup.sample, cfg.seed, cfg.parallel.threads)


def _measure(world: World, run: PlannedRun) -> list[float]:
    return seconds_of_layers(run.setup(world))


def describe(setup: Setup) -> str:
    """Return the plan of a run for the console."""
    from training.reporting.console import describe_plan

    plan = describe_plan(setup)
    warning = unseen(setup.cfg.model, setup.chain) if reads_weights(setup.cfg, setup.chain) else None
    tokens = getattr(setup.data.vocabulary, "warning", None)
    late = unreached(setup)
    warnings = [f"warning: {text}" for text in (warning, tokens, across_nodes(setup), late) if text is not None]
    whole = [ONE_LAYER] if len(setup.chain.layers) == 1 else []
    recipe = filter(None, [describe_recipe(setup.cfg)])
    return "\n".join([plan, *whole, *_shorter(setup), *setup.by_microbatch[1], *warnings, *recipe])


def _shorter(setup: Setup) -> list[str]:
    """Return a line if ``train.epochs`` ends the run before ``train.steps``; otherwise none."""
    train = setup.cfg.train
    if setup.cfg.mode != "train" or train.steps is None or setup.total_steps >= train.steps:
        return []
    ended = f"after {setup.total_steps} steps, before train.steps={train.steps}"
    return [f"train.epochs={train.epochs:g} ends this run {ended}; without that limit: train.epochs=null"]


def describe_recipe(cfg: Root) -> str:
    """Return a line about the recipe (the model file's values for other groups); empty if it has no description."""
    recipe = cfg.recipes[cfg.recipe] if cfg.get("recipe") is not None else {}
    if "says" not in recipe:
        return ""
    rates = [asked["lr"] for asked in recipe.values() if hasattr(asked, "keys") and "lr" in asked]
    optimizer = cfg.optim._target_.rpartition(".")[2]
    typed = "" if cfg.optim.lr in rates else f"; here {optimizer} at lr {cfg.optim.lr:g}"
    return f"recipe: {cfg.recipe}, {recipe['says']}{typed}"


def model_and_data(cfg: Root) -> tuple[Any, Chain, DataSet]:
    """Build the chain and the data set that ``cfg`` describes. The data is prepared only if the chain needs it.

    Returns:
        The configuration, the chain and the data set. In the configuration, sizes replace the nulls of the section
        ``model`` if the model's function has an attribute ``sizes_of``: (section, the data's number of words) ->
        {key: value}.
    """
    data = _data_of(cfg.data)
    if cfg.mode == "predict":  # each row has a prediction
        for part in data.parts.values() if isinstance(data, Mixture) else [data] if isinstance(data, RowData) else ():
            part.packing = False
    if (sizes_of := getattr(target_of("model", cfg.model), "sizes_of", None)) is not None:
        sizes = sizes_of(to_dict(cfg.model), data.vocab_size)
        cfg = with_values(cfg, in_section("model", sizes))
    check_kind(data, cfg.model)
    if "vocab_size" in cfg.model and cfg.model.vocab_size is None:
        data.prepare()  # the vocabulary's size is known only after that
    chain, terms = build_chain(cfg.model, data.vocab_size), {key: cfg.train[key] for key in TERMS if cfg.train[key]}
    if cfg.model.get("loss") == NAME and cfg.mode not in _ALONE:
        chain = prefer(chain, **checked_arguments("models.preference.prefer", to_dict(cfg.model.dpo), "model.dpo."))
    if terms and type(chain.loss) is not TokenCrossEntropy:
        raise TrainingError(
            f"train.{next(iter(terms))} needs the cross entropy of tokens (models.losses.TokenCrossEntropy), and the "
            f"loss of model={cfg.model.name} is {type(chain.loss).__name__}; leave it out. For classes: "
            "'model.loss={_target_: torch.nn.CrossEntropyLoss, label_smoothing: 0.1}'"
        )
    return cfg, chain.with_loss(TokenCrossEntropy(**terms)) if terms else chain, data


def _data_of(section: Any) -> DataSet:
    """Build the data set of the section ``data``; of a mixture, the parts first."""
    if target_of("data", section) is not Mixture:
        return build("data", section)
    parts, own = {}, {key: value for key, value in section.items() if key not in {"parts", *OWN_KEYS["data"]}}
    for name, part in section.parts.items() if hasattr(section.parts, "keys") else ():
        keys = {key: value for key, value in part.items() if key not in ("name", "weight")}
        with in_part(name):
            parts[name] = build(f"data.parts.{name}", keys), part.get("weight", 1)
    return build("data", own, parts=parts)


def _chain_of(model: Any, arguments: dict[str, Any]) -> Chain:
    """Build the chain that a section's target returns, or a chain of one layer if the target returns a module."""
    target = target_of("model", arguments)
    if not (inspect.isclass(target) and issubclass(target, nn.Module)):
        made = build("model", arguments)
        if not isinstance(made, nn.Module):
            return made
    if not hasattr(model.get("loss"), "copy"):
        raise TrainingError(
            f"model={model.name}: {arguments['_target_']} gives an nn.Module, which says no loss; write "
            "'model.loss={_target_: torch.nn.CrossEntropyLoss}'"
        )
    return chain_of_module(partial(build, "model", arguments), instantiate(model.loss))


def build_chain(model: Any, vocab_size: int | None = None) -> Chain:
    """Build the chain that the section ``model`` describes.

    Args:
        model: The section.
        vocab_size: The data's number of words, which replaces a ``vocab_size`` of None.

    Raises:
        TrainingError: The model does not accept the arguments.
    """
    loss = model.get("loss")
    own_loss = hasattr(loss, "copy")  # a section or several; otherwise ``loss`` is an argument of the model's function
    dropped = OWN_KEYS["model"] if own_loss or loss in (None, NAME) else OWN_KEYS["model"] - {"loss"}
    arguments = {key: value for key, value in model.items() if key not in dropped}
    if "vocab_size" in arguments and arguments["vocab_size"] is None:
        arguments["vocab_size"] = vocab_size
    elif "vocab_size" in arguments and model.get("extra_tokens") is not None:
        arguments["vocab_size"] = vocabulary_with(arguments["vocab_size"], model.extra_tokens)
    if "loss" in arguments and "loss" not in inspect.signature(target_of("model", arguments)).parameters:
        raise TrainingError(f"model.loss={loss}: write 'model.loss={{_target_: models.losses.SquaredError}}'")
    chain = _chain_of(model, arguments)
    try:
        skeleton = chain.skeleton()
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items() if isinstance(value, int))
        sizes = f" with {given}" if given else ""
        raise TrainingError(f"model={model.name} cannot be built{sizes}: {str(error).splitlines()[0]}") from None
    tied = {*chain.tied, *chain.tied.values()}
    if unknown := sorted(tied - {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}):
        raise TrainingError(f"model={model.name} ties {', '.join(unknown)}, which is no parameter of it")
    for alias, owner in chain.tied.items():
        if owner in chain.tied:
            last = chain.tied[owner]
            raise TrainingError(f"model={model.name} ties {alias} to {owner}, which is tied itself; tie both to {last}")
    inside = {}  # parameters that are tied within one layer
    for name, layer in skeleton.items():
        for alias, owner in aliases(layer.named_parameters(name, remove_duplicate=False)).items():
            if not {alias, owner} & tied:
                inside[alias] = owner
            elif chain.canonical(alias) != chain.canonical(owner):
                raise TrainingError(
                    f"model={model.name}: {alias} and {owner} are one parameter of layer {name!r}, and Chain.tied has "
                    "only one of them; add the other, with the same original"
                )
    if inside:
        chain = replace(chain, tied={**chain.tied, **inside})
    if own_loss:
        chain = chain.with_loss(instantiate(loss))
    if model.get("extra_tokens") is not None and chain.embedding is None:
        raise TrainingError(
            f"model.extra_tokens: model={model.name} does not name its embedding parameter (Chain.embedding), "
            "so its vocabulary cannot grow; leave model.extra_tokens out"
        )
    if (lora := model.get("lora")) is not None and lora.rank is not None:
        given = {key: value for key, value in to_dict(lora).items() if key in LORA}
        given |= {key: [name] for key, name in given.items() if key in _NAMES and isinstance(name, str)}
        chain = adapt(chain, **checked_arguments("models.lora.adapt", given, "model.lora."))
        if model.get("extra_tokens") is not None and chain.embedding in chain.unsaved:
            raise TrainingError(
                "model.extra_tokens with model.lora.rank: the new tokens' rows would not be trained; name the "
                f"embedding in model.lora.modules_to_save, [{str(chain.embedding).split('.')[-2]}]"
            )
    return chain
