"""From a configuration to the objects of a run, with everything checked that can be checked before it starts."""

from __future__ import annotations

import inspect
import json
import math
import pickle
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.cuda import get_device_properties
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import TrainingError, UserError
from common.machine import check_memory
from conf import OWN_KEYS
from conf.instantiate import build, check_section, environment, instantiate, target_of, to_config, to_dict
from data.dataset import Batch, DataSet
from data.loader import TrainBatches
from launchers import World, run_workers
from launchers.heartbeat import note
from models.chain import LOSS, Chain
from models.given import given_objects, set_given
from models.lora import adapt
from parallel.balance import bytes_per_layer, equal_stages, seconds_per_layer, stage_shares
from parallel.devices import Hardware, check_compiler
from parallel.plan import Plan, make_plan
from parallel.schedules import SCHEDULES
from parallel.shape_inference import check_gpus, drawing_by_microbatch
from parallel.strategies import strategy_info
from training.callbacks import build as build_callbacks
from training.checkpoint.configuration import check_fits, checkpoint_of
from training.checkpoint.init_from import check_base, check_copies, check_start, unseen, vocabulary_with
from training.optimizer import check_layout, check_optimizer, check_others, check_rates, states_of
from training.reporting.recorder import sections
from training.reporting.summary import check_objective
from training.run.evaluate import extents
from training.run.first_batch import check_read, check_shapes, check_splits

BALANCES = ("time", "size")  # values of parallel.balance that are measured


@dataclass
class Setup:
    """The objects of a run.

    Attributes:
        cfg: The configuration.
        chain: The model.
        data: The data set, prepared.
        plan: The layout.
        shares: What stages were measured to cost, as (parts of 1, of what); None where nothing was measured.
    """

    cfg: Any
    chain: Chain
    data: DataSet
    plan: Plan
    shares: tuple[list[float], str] | None = None

    @cached_property
    def per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        samples = self.cfg.train.global_batch_size
        return TrainBatches(self.data.train, samples, self.cfg.seed, dp_size=self.plan.dp).steps_per_epoch

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.cfg.train.steps, self.cfg.train.epochs, self.per_epoch)

    @property
    def sample(self) -> Batch:
        """One micro-batch of training data, for its shapes and dtypes."""
        indices = np.zeros(self.plan.microbatch_size, dtype=np.int64)
        return Batch(*self.data.train.read(indices, 0))

    @property
    def extents(self) -> dict[str, str]:
        """How much of "val" and "test" a limited evaluation covers; see ``training.run.evaluate.extents``."""
        return extents(self.data, self.plan.global_batch_size, self.cfg.train.eval_batches)

    @cached_property
    def by_microbatch(self) -> tuple[str | None, list[str]]:
        """How large micro-batches are, where the numbers depend on it, and why they do, a line for each reason."""
        plan, size, lines = self.plan, None, []
        info = strategy_info(plan.strategy)
        copies = len(plan.devices) if info.several_devices and not info.stages else 1
        each, pieces = plan.microbatch_size // copies, plan.dp * plan.chunks * copies
        if drawing := drawing_by_microbatch(self.chain, self.sample):
            size = f"{each}"
            layers = [name for name in drawing if name != LOSS]
            named = " and ".join([", ".join(layers[:3]), *[f"{len(layers) - 3} more"] * (len(layers) > 3)])
            who = [f"layer{'s' * (len(layers) > 1)} {named}"] * bool(layers)
            who += [f"the loss {type(self.chain.loss).__name__}"] * (LOSS in drawing)
            draw = f"{' and '.join(who)} {'draws by itself' if len(drawing) == 1 else 'draw by themselves'}"
            lines.append(f"numbers depend on the micro-batch ({size} sample{'s' * (each > 1)}): {draw}")
        if any(isinstance(module, _BatchNorm) for module in self.chain.skeleton().modules()):
            replicas = plan.dp if self.cfg.parallel.sync_batchnorm else 1
            size = f"{each * replicas}" + f" ({each} of each of {replicas} replicas)" * (replicas > 1)
            alike = f"the numbers of parallel=single parallel.chunks={pieces // replicas}"
            if replicas > 1 and plan.chunks > 1:
                alike = f"not {alike}, where other samples meet"
            if pieces > 1:
                lines.append(f"BatchNorm over micro-batches of {size}: {alike}")
        return size, lines


def build_setup(cfg: Any, world_size: int, nodes: int) -> Setup:
    """Build what another process has checked; see ``prepare``."""
    note(0, "preparing the data")
    chain, data = model_and_data(cfg)
    plan = _plan(cfg, chain, world_size, nodes)
    data.prepare()
    return Setup(cfg, chain, data, plan)


def prepare(cfg: Any, world_size: int | None = None, nodes: int = 1, hardware: Hardware | None = None) -> Setup:
    """Build the chain and the plan and prepare the data, and check each as soon as it is there.

    Args:
        cfg: The configuration; what it leaves to measurement is replaced by the result.
        world_size: The number of processes where they are started already (torchrun), else None.
        nodes: The number of machines.
        hardware: Of the machine that will run it, on which times are measured then; None for this one.

    Raises:
        UserError: For a configuration that cannot run, with the numbers and a way out.
    """
    chain, data = checked_model_and_data(cfg)
    setup = Setup(cfg, chain, data, _plan(cfg, chain, world_size, nodes, hardware))
    for check in (_check_parameters, _check_optimizer_layout, _check_gpus, _check_compile):
        check(setup)
    note(0, "preparing the data")
    data.prepare()
    note(0, "checking the run")
    for check in (check_splits, check_fit, _check_length_of_run, check_read, check_sample, check_shapes):
        check(setup)
    if cfg.parallel.balance in BALANCES and len(setup.plan.stages) > 1:
        _balance(setup, world_size, nodes, hardware)
    return setup


def checked_model_and_data(cfg: Any) -> tuple[Chain, DataSet]:
    """Build the chain and the data, and check all that does not depend on the layout. Raises UserError."""
    for check in (check_train, environment, _check_sections):
        check(cfg)
    chain, data = model_and_data(cfg)
    for check in (_check_names, _check_weights, check_length):
        check(cfg, chain, data)
    return chain, data


# -- checks of the configuration -------------------------------------------------------------------------------------


def check_train(cfg: Any) -> None:
    """Check the rules of the section ``train``, and of restarts. Raises TrainingError."""
    train = cfg.train
    if cfg.mode == "train" and cfg.checkpoint is not None:
        raise TrainingError(
            f"checkpoint={cfg.checkpoint} is for mode=eval, export and sample; to go on with its training: "
            f"train.resume={cfg.checkpoint}, to start from its weights: mode=export, then model.init_from="
        )
    if (recipe := cfg.get("recipe")) is not None and recipe not in (known := cfg.get("recipes") or {}):
        raise TrainingError(f"recipe={recipe}: model={cfg.model.name} has {', '.join(known) or 'none'}")
    restarts = cfg.launcher.get("max_restarts", 0)
    if restarts < 0:
        raise TrainingError(f"launcher.max_restarts={restarts} must be at least 0")
    if train.steps is None and train.epochs is None:
        raise TrainingError("neither train.steps nor train.epochs is set: say how long, for example train.steps=100")
    bounds = {
        "steps": 1, "global_batch_size": 1, "max_skipped": 0, "profile": 0, "keep_checkpoints": 1,
        "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "spike_rollback": 1,
    }  # fmt: skip
    for key, least in bounds.items():
        value = train[key]
        if value is not None and value < least:
            raise TrainingError(f"train.{key}={value} must be at least {least}")
    for key in ("epochs", "grad_clip", "clip_value"):
        value = train[key]
        if value is not None and not 0 < value < math.inf:
            raise TrainingError(f"train.{key}={value} must be above 0, and finite")
    if train.spike_factor is not None and not train.spike_factor > 1:
        raise TrainingError(f"train.spike_factor={train.spike_factor} must be above 1, such as 3")
    if train.spike_rollback is not None and train.spike_factor is None:
        raise TrainingError(
            f"train.spike_rollback={train.spike_rollback} needs train.spike_factor, such as train.spike_factor=3"
        )
    if train.deterministic and train.cudnn_benchmark:
        raise TrainingError(
            "train.cudnn_benchmark=true takes whichever algorithm was fastest this time, train.deterministic=true the "
            "same one every time: switch one of them off"
        )


def _saved(cfg: Any) -> Path | None:
    """The checkpoint that the configuration names."""
    if cfg.mode == "eval":
        return checkpoint_of(cfg)
    return None if cfg.train.resume in (None, "auto") else Path(cfg.train.resume)


def _check_sections(cfg: Any) -> None:
    check_optimizer(to_dict(cfg.optim))
    build("scheduler", cfg.scheduler)
    build_callbacks(cfg.callbacks)
    for place, section in sections(cfg).items():
        check_section(place, section)


# -- checks of the model and the data that it names ------------------------------------------------------------------


def check_kind(data: DataSet, model: Any) -> None:
    """Check that both are about tokens or neither is. Raises TrainingError."""
    if (data.seq_len is None) == ("vocab_size" not in model):
        return
    kind = "tokens" if data.seq_len is not None else "numbers"
    raise TrainingError(
        f"model={model.name} does not take the {kind} of this data set; leave data= out, and the model brings its own"
    )


def check_length(cfg: Any, chain: Chain, data: DataSet) -> None:
    """Check that a sample is no longer than the model's positions. Raises TrainingError."""
    positions = chain.limits.get("positions")
    if positions is not None and data.seq_len > positions:
        raise TrainingError(
            f"data.seq_len={data.seq_len} is longer than the model's {positions} positions; set "
            f"data.seq_len={positions} or less, or give the model more (model.block_size={data.seq_len} of gpt2, "
            f"model.max_len={data.seq_len} of transformer)"
        )


def _check_names(cfg: Any, chain: Chain, data: DataSet) -> None:
    check_rates(to_dict(cfg.optim).get("rates"), chain)
    if cfg.sweep.objective is not None:
        check_objective(cfg.sweep.objective, chain.loss.metrics, data.seq_len is not None)


def _check_weights(cfg: Any, chain: Chain, data: DataSet) -> None:
    if (saved := _saved(cfg)) is not None:
        check_fits(saved, chain, cfg)
    if _reads_weights(cfg, chain):
        check_copies(cfg.model, check_start(cfg.model, chain))
    check_base(cfg, chain)


def _reads_weights(cfg: Any, chain: Chain) -> bool:
    anew = cfg.mode != "eval" and cfg.train.resume is None
    return cfg.model.init_from is not None and (anew or chain.base is not None)


# -- checks of the plan ----------------------------------------------------------------------------------------------


def _check_parameters(setup: Setup) -> None:
    if setup.cfg.mode == "train" and setup.plan.parameters == 0:
        frozen = sum(parameter.numel() for parameter in setup.chain.skeleton().parameters())
        why = f"all {frozen:,} are frozen (requires_grad=False)" if frozen else "its layers have none"
        raise TrainingError(f"model={setup.cfg.model.name} has no parameters to train: {why}")


def _check_optimizer_layout(setup: Setup) -> None:
    if setup.cfg.mode in ("train", "plan"):
        check_layout(to_dict(setup.cfg.optim), setup.plan, setup.chain)
        check_others(to_dict(setup.cfg.optim), setup.chain)


def _check_gpus(setup: Setup) -> None:
    if setup.plan.gpus is not None and not setup.plan.devices:
        check_gpus(setup.plan, certain_tensors(setup.cfg), lambda gpu: get_device_properties(gpu).total_memory)


def certain_tensors(cfg: Any) -> int:
    """Return how many tensors of a parameter's size a run holds at least: the weight, its gradient, its state."""
    return 2 + states_of(cfg.optim, unknown=0) if cfg.mode == "train" else 1


def _check_compile(setup: Setup) -> None:
    schedule = setup.plan.schedule
    if not setup.cfg.train.compile:
        return
    if schedule is not None and SCHEDULES[schedule].splits_backward:
        raise TrainingError(
            f"train.compile=true: what is compiled has one backward, and parallel.schedule={schedule} runs it "
            "in two parts; use parallel.schedule=interleaved_1f1b, or train.compile=false"
        )
    check_compiler()


# -- checks of the samples: those of training.run.first_batch, and these ---------------------------------------------


def check_fit(setup: Any) -> None:
    """Check that the model has room for the data's words or classes. Raises TrainingError."""
    for limit, things, key in (("vocabulary", "tokens", "vocab_size"), ("classes", "classes", "num_classes")):
        most, given = setup.chain.limits.get(limit), getattr(setup.data, key, None)
        if None not in (most, given) and given > most:
            said = f"the data has {given} {things}, model.{key}={most} is too few; set model.{key}={given} or more"
            raise TrainingError(said)


def check_sample(setup: Any) -> None:
    """Check that one micro-batch fits into memory, by one of its samples.

    Raises:
        UserError: It does not.
    """
    one = Batch(*setup.data.train.read(np.zeros(1, dtype=np.int64), 0))
    size = sum(tensor.nbytes for tensor in (*one.input_tensors, one.targets))
    count = setup.plan.microbatch_size
    check_memory(
        2 * size * count,
        f"a micro-batch of {count} samples of {size / 2**20:,.1f} MiB",
        "choose more parallel.chunks, a smaller train.global_batch_size or smaller samples",
    )


def _check_length_of_run(setup: Setup) -> None:
    """Count its steps, which raises where the data have too few samples for one."""
    setup.total_steps  # noqa: B018


# -- balance ---------------------------------------------------------------------------------------------------------


def _balance(setup: Setup, world_size: int | None, nodes: int, hardware: Hardware | None) -> None:
    """Measure what each layer costs, and replace the word in the configuration by the number of layers per stage."""
    cfg, plan = setup.cfg, setup.plan
    if cfg.parallel.balance == "time":
        if hardware is not None:
            return  # the run's first rank measures
        apart = plan.device_type == "cuda" and world_size is None and plan.processes > 1
        costs = _seconds_in_own_process(cfg) if apart else seconds_of_layers(setup)
    else:
        costs = bytes_per_layer(plan, setup.chain, setup.sample, 2 + states_of(cfg.optim))
    unit = "of the time" if cfg.parallel.balance == "time" else "of the memory"
    cfg.parallel.balance = equal_stages(costs, len(plan.stages), plan.pp, plan.chunks, plan.schedule)
    setup.plan = _plan(cfg, setup.chain, world_size, nodes, hardware)
    setup.shares = stage_shares(costs, [len(stage.layers) for stage in setup.plan.stages]), unit


def seconds_of_layers(setup: Setup) -> list[float]:
    """Measure the seconds of each layer of the model on this machine."""
    cfg = setup.cfg
    return seconds_per_layer(setup.plan, setup.chain, setup.sample, cfg.seed, cfg.parallel.threads)


def _seconds_in_own_process(cfg: Any) -> list[float]:
    """Measure in a process that ends: this one would keep a context on a GPU that the run's ranks use."""
    with tempfile.TemporaryDirectory() as folder:
        run_workers(_measure, (to_dict(cfg), folder), 1, Path(folder) / "logs")
        return json.loads((Path(folder) / "seconds.json").read_text())


def _measure(world: World, tree: dict, folder: str) -> None:
    cfg = to_config(tree)
    cfg.parallel.balance = "uniform"
    (Path(folder) / "seconds.json").write_text(json.dumps(seconds_of_layers(prepare(cfg))))


def describe(setup: Setup) -> str:
    """The plan of a run, for its console."""
    from training.reporting.console import describe_data, describe_plan

    evaluated = setup.cfg.train.eval_every is not None or setup.cfg.mode == "eval"
    data = describe_data(setup.data.description, setup.data.unigram_entropy, setup.extents if evaluated else {})
    recipe = f"\n{line}" if (line := describe_recipe(setup.cfg)) else ""
    plan = describe_plan(setup.plan, setup.cfg.model.name, data, setup.data.seq_len, setup.shares)
    warning = unseen(setup.cfg.model, setup.chain) if _reads_weights(setup.cfg, setup.chain) else None
    warnings = [] if warning is None else [f"warning: {warning}"]
    return "\n".join([plan, *setup.by_microbatch[1], *warnings]) + recipe


def describe_recipe(cfg: Any) -> str:
    """What the model's file asks of the optimizer and the other groups, for the plan; empty where it says nothing."""
    recipe = cfg.recipes[cfg.recipe] if cfg.get("recipe") is not None else {}
    if "says" not in recipe:
        return ""
    rates = [asked["lr"] for asked in recipe.values() if hasattr(asked, "keys") and "lr" in asked]
    optimizer = cfg.optim._target_.rpartition(".")[2]
    typed = "" if cfg.optim.lr in rates else f"; here {optimizer} at lr {cfg.optim.lr:g}"
    return f"recipe: {cfg.recipe}, {recipe['says']}{typed}"


def _plan(cfg: Any, chain: Chain, world_size: int | None, nodes: int, hardware: Hardware | None = None) -> Plan:
    return make_plan(
        cfg.parallel,
        chain,
        global_batch_size=cfg.train.global_batch_size,
        device=cfg.device,
        precision=cfg.train.precision,
        world_size=world_size,
        nodes=nodes,
        hardware=hardware,
    )


def model_and_data(cfg: Any) -> tuple[Chain, DataSet]:
    """Build the chain and the data set that ``cfg`` describes; the data is prepared only where the chain needs it.

    Sizes that the section ``model`` leaves open (null) are set in it, where the model's function has an attribute
    ``sizes_of`` that knows them: (section, the data's number of words) -> {key: value}.
    """
    data = build("data", cfg.data)
    if (sizes_of := getattr(target_of("model", cfg.model), "sizes_of", None)) is not None:
        cfg.model.update(sizes_of(to_dict(cfg.model), data.vocab_size))
    check_kind(data, cfg.model)
    if "vocab_size" in cfg.model and cfg.model.vocab_size is None:
        data.prepare()  # only the data knows how many words there are
    return build_chain(cfg.model, data.vocab_size), data


def build_chain(model: Any, vocab_size: int | None = None) -> Chain:
    """Build the chain that the section ``model`` describes.

    Args:
        model: The section.
        vocab_size: The data's number of words, for a model whose own is None.

    Raises:
        TrainingError: For arguments that the model refuses.
    """
    loss = model.get("loss")
    own_loss = hasattr(loss, "keys")  # and not a parameter of the model's
    dropped = OWN_KEYS["model"] if own_loss or loss is None else OWN_KEYS["model"] - {"loss"}
    arguments = {key: value for key, value in model.items() if key not in dropped}
    if "vocab_size" in arguments and arguments["vocab_size"] is None:
        arguments["vocab_size"] = vocab_size
    elif model.get("extra_tokens") is not None:
        arguments["vocab_size"] = vocabulary_with(arguments["vocab_size"], model.extra_tokens)
    if "loss" in arguments and "loss" not in inspect.signature(target_of("model", arguments)).parameters:
        raise TrainingError(f"model.loss={loss}: write 'model.loss={{_target_: models.losses.SquaredError}}'")
    chain = build("model", arguments)
    try:
        names = {name for name, _ in chain.skeleton().named_parameters(remove_duplicate=False)}
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items() if isinstance(value, int))
        sizes = f" with {given}" if given else ""
        raise TrainingError(f"model={model.name} cannot be built{sizes}: {str(error).splitlines()[0]}") from None
    if unknown := sorted({*chain.tied, *chain.tied.values()} - names):
        raise TrainingError(f"model={model.name} ties {', '.join(unknown)}, which is no parameter of it")
    if own_loss:
        chain = chain.with_loss(instantiate(loss))
    if model.get("extra_tokens") is not None and chain.embedding is None:
        raise TrainingError(
            f"model.extra_tokens: model={model.name} does not say which parameter is its embedding (Chain.embedding), "
            "so its vocabulary cannot grow; leave model.extra_tokens out"
        )
    if (lora := model.get("lora")) is not None and lora.rank is not None:
        if model.get("extra_tokens") is not None:
            raise TrainingError("model.extra_tokens with model.lora.rank: the new tokens' rows would not be trained")
        targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
        chain = adapt(chain, lora.rank, lora.alpha, lora.dropout, targets)
    return chain


def total_steps(steps: int | None, epochs: float | None, per_epoch: int) -> int:
    """The number of optimizer steps of a run: what ``steps`` and ``epochs`` (None: no limit) allow, the smaller one."""
    by_epochs = math.ceil(epochs * per_epoch) if epochs is not None else math.inf
    return int(min(steps if steps is not None else math.inf, by_epochs))


def pack_given() -> bytes | None:
    """Return all given objects as bytes for another process of the same program; None for a command line's.

    Classes and functions of a script or a notebook are sent as code, others by their names.

    Raises:
        UserError: An object cannot be sent.
    """
    objects = given_objects()
    if objects is None:
        return None
    import cloudpickle

    try:
        return cloudpickle.dumps(objects)
    except (TypeError, pickle.PicklingError) as error:
        raise UserError(f"{' and '.join(objects)} cannot be sent to the run's processes: {error}") from error


def unpack_given(packed: bytes | None) -> None:
    """Give this process what ``pack_given`` has returned."""
    if packed is not None:
        set_given(pickle.loads(packed))
