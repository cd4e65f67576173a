"""Checks the model with its data, its plan and the checkpoint that it starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import models
from common.errors import DataError, TrainingError
from common.files import folder_of
from conf import EVALUATES
from conf.instantiate import build, to_dict
from conf.schema import Root
from data.arrays import Arrays
from data.cache import cached_folder, key_of
from data.dataset import DataSet, renumbered
from data.loader import Joined
from data.mixture import Mixture
from data.vocabulary import GPT2Vocabulary, tokens_after_gpt2
from models.chain import Chain
from models.losses import is_of_tokens
from models.preference import DPO, NAME
from parallel.axes import axes_of
from parallel.devices import check_compiler
from parallel.layout import Layout
from training.callbacks import build as build_callbacks
from training.callbacks.averaging import averaging_of
from training.callbacks.early_stop import EarlyStop
from training.checkpoint.configuration import checkpoint_of
from training.checkpoint.files import Checkpoint
from training.checkpoint.init_from import check_new_words, check_start
from training.checkpoint.load import check_fits
from training.optimizer.checks import check_by_module, check_layout, check_others
from training.optimizer.groups import frozen_until
from training.reporting.monitor import LOSS, MINIMIZE, SUMMARISED, Monitor, check_name, direction_of, evaluated
from training.run.split_metrics import entries, target_of

if TYPE_CHECKING:
    from training.run.setup import Setup

_MODELS = Path(models.__file__).parent


def named_checkpoint(cfg: Root) -> Path | None:
    """Return the checkpoint that the configuration names; None if it names none."""
    if cfg.mode in EVALUATES:
        return checkpoint_of(cfg)
    return None if cfg.train.resume in (None, "auto") else Path(cfg.train.resume)


def check_kind(data: DataSet, model: Any) -> None:
    """Check that data and model both use tokens, or that neither does, except for arrays. Raises TrainingError."""
    first = data.first if isinstance(data, Mixture) else data
    if (data.seq_len is None) == ("vocab_size" not in model) or isinstance(first, Arrays):
        return
    kind = "tokens" if data.seq_len is not None else "numbers"
    way_out = "leave data= out to use the model's default data"
    raise TrainingError(f"model={model.name} does not take the {kind} of this data set; {way_out}")


def check_length(cfg: Root, chain: Chain, data: DataSet) -> None:
    """Check that samples are not longer than the model's positions. Raises TrainingError."""
    positions = chain.limits.get("positions")
    if positions is not None and data.seq_len is not None and data.seq_len > positions:
        raise TrainingError(
            f"data.seq_len={data.seq_len} is longer than the model's {positions} positions; set "
            f"data.seq_len={positions} or less, or give the model more (model.block_size={data.seq_len} of gpt2, "
            f"model.max_len={data.seq_len} of transformer)"
        )


def check_names(cfg: Root, chain: Chain, data: DataSet) -> None:
    """Check that ``optim.rates`` and ``optim.decays`` name parameters, and that the metrics for comparing exist.

    Raises:
        TrainingError: A name is wrong, or the direction of a metric is unknown.
    """
    optim = to_dict(cfg.optim)
    check_by_module("optim.rates", optim.get("rates"), chain, "factors by module, such as {fc: 10, layer4.0: 0.1}")
    check_by_module("optim.decays", optim.get("decays"), chain, "numbers by module, such as {embedding: 0, head: 0.01}")
    frozen_until(to_dict(cfg.train)["unfreeze"], chain)
    parts = [*data.parts] if isinstance(data, Mixture) else []
    for part in parts:
        if direction_of(name := f"{LOSS}_{part}") != MINIMIZE:
            raise TrainingError(f"data.parts.{part}: {name} does not read as a loss; give the part another name")
    for entry in entries(cfg.metrics):
        target_of(entry)
        if (name := entry.name) in ("loss", "perplexity", *chain.loss.metrics):
            raise TrainingError(f"metrics: an evaluation has a number {name} already; name yours, {{…, name: …}}")
    of_tokens = data.seq_len is not None and is_of_tokens(chain.loss)
    train, numbers = cfg.train, partial(evaluated, _metrics(cfg, chain, parts), of_tokens)
    if (objective := cfg.sweep.objective) is not None:
        check_name("sweep.objective", objective, [*numbers(("val", "test")), *SUMMARISED.split()])
        Monitor.of(train, objective, cfg.sweep.direction, ("sweep.objective", "sweep.direction"))
    if cfg.mode in ("train", "plan", "compare"):
        _check_monitored(cfg, numbers())


def _metrics(cfg: Root, chain: Chain, parts: Iterable[str]) -> list[str]:
    """Return the names of the metrics of the loss, of the results of the parts of a mixture, and of ``metrics``."""
    own, whole = chain.loss.metrics, [entry.name for entry in entries(cfg.metrics)]
    # A metric may give several numbers: ``check_metrics`` knows which.
    typed = [cfg.train.monitor or "", *(s.metric or "" for s in build_callbacks(cfg.callbacks, EarlyStop).values())]
    whole += [name.partition("_")[2] for name in typed if name.startswith(tuple(f"val_{one}_" for one in whole))]
    return [*own, *(f"{name}_{part}" for part in parts for name in ("loss", *own)), *whole]


def _check_monitored(cfg: Root, numbers: Sequence[str]) -> None:
    check_name("train.monitor", cfg.train.monitor or LOSS, numbers)
    Monitor.of(cfg.train)
    for name, stop in build_callbacks(cfg.callbacks, EarlyStop).items():
        check_name(f"callbacks.{name}.metric", stop.metric or cfg.train.monitor or LOSS, numbers)
        stop.monitor(cfg.train)


def check_evaluated(setup: Setup) -> None:
    """Check that a run has evaluations if its settings need them. Raises TrainingError."""
    if setup.cfg.mode == "predict":
        setup.data.source_of(setup.cfg.predict.split)
    cfg, train, never = setup.cfg, setup.cfg.train, setup.cfg.train.eval_every is None
    needs = [f"callbacks.{name}" for name in build_callbacks(cfg.callbacks, EarlyStop)]
    needs += ["scheduler"] * (follows := hasattr(build("scheduler", cfg.scheduler), "on_evaluation"))
    needs += [f"train.{key}={train[key]}" for key in ("monitor", "test") if train[key] not in (None, "last")]
    if cfg.mode == "train" and needs and (never or setup.data.valid is None):
        why = "train.eval_every=null: set it to 0" if never else "its data have no validation split"
        raise TrainingError(f"{needs[0]} compares evaluations, but this run has none: {why}, or leave {needs[0]} out")
    if cfg.mode == "train" and follows and train.eval_every == 0:
        epoch = f"train.eval_every={setup.per_epoch} for one in each epoch"
        raise TrainingError(f"scheduler follows evaluations, and train.eval_every=0 has one at the end: set {epoch}")
    # Some parts of a mixture may have no validation split.
    if cfg.mode == "train" and needs and isinstance(setup.data.valid, Joined):
        metrics = _metrics(cfg, setup.chain, setup.data.valid.parts)
        _check_monitored(cfg, evaluated(metrics, setup.of_tokens))


def check_proof(cfg: Root, chain: Chain, data: DataSet) -> None:
    """Check that the chain computes the same outputs as the model it was made from. Raises ModelError.

    The data cache keeps each proof under a key: the model's configuration, the versions of torch and transformers, and
    the code of ``models``.
    """
    if (prove := chain.prove) is None or chain.hugging_face is None:
        return
    code = [path.read_text("utf-8") for path in sorted(_MODELS.glob("*.py"))]
    name = f"proved-{key_of(chain.hugging_face.config, torch.__version__, *code)}"  # the config names transformers'
    try:
        cached_folder(data.cache_dir, name, lambda _: prove())
    except DataError:  # the cache cannot be written
        prove()


def check_saved_weights(cfg: Root, chain: Chain, data: DataSet) -> None:
    """Check that the checkpoint and the weights of model.init_from belong to this model. Raises UserError."""
    if (saved := named_checkpoint(cfg)) is not None:
        check_fits(saved, chain, cfg)
        check_classes(Checkpoint.find(saved), data)
    if reads_weights(cfg, chain):
        weights = check_start(cfg.model, chain)
        weights.check_copies()
        check_new_words(cfg.model, chain, weights, data.vocab_size)
        folder = folder_of(cfg.model.init_from)
        if isinstance(data.vocabulary, GPT2Vocabulary) and tokens_after_gpt2(folder) is None:
            raise TrainingError(
                f"{folder / 'tokenizer.json'} has other tokens than GPT-2's, which the data has; type "
                f"data.tokenizer={cfg.model.init_from}"
            )


def check_classes(checkpoint: Checkpoint, data: DataSet) -> None:
    """Check that the data numbers its classes as the data of a checkpoint's run did. Raises TrainingError."""
    trained, now = checkpoint.progress.get("classes", []), data.class_names()
    if (number := renumbered(trained, now)) is not None:
        raise TrainingError(
            f"class {number} was {trained[number]!r} in the data of {checkpoint.folder}, and is {now[number]!r} in "
            "this data: give it images of the same classes, in folders of the same names"
        )


def reads_weights(cfg: Root, chain: Chain) -> bool:
    """Return whether a run starts from the weights of model.init_from, or trains adapters on them."""
    anew = cfg.mode not in EVALUATES and cfg.train.resume is None
    return cfg.model.init_from is not None and (anew or bool(chain.unsaved))


def check_fit(setup: Setup) -> None:
    """Check that the model has room for the data's words or classes. Raises TrainingError."""
    for limit, things, key in (("vocabulary", "tokens", "vocab_size"), ("classes", "classes", "num_classes")):
        most, given = setup.chain.limits.get(limit), getattr(setup.data, key, None)
        if most is not None and given is not None and given > most:
            said = f"the data has {given} {things}, model.{key}={most} is too few; set model.{key}={given} or more"
            raise TrainingError(said)


def check_pairs(setup: Setup) -> None:
    """Check that samples are pairs of answers if, and only if, the loss is that of pairs. Raises TrainingError."""
    shape = getattr(setup.data.train.read(np.zeros(1, dtype=np.int64), 0)[1], "shape", ())[1:]
    compares = isinstance(setup.chain.loss, DPO)
    if setup.data.pairs and setup.cfg.mode == "predict":
        raise TrainingError("mode=predict answers pairs of one data set, not of a mixture: type data= of a part")
    if setup.data.pairs > compares or compares > (len(shape) == 2 and shape[0] == 2):
        raise TrainingError(
            f"model.loss={NAME} and samples of two answers, targets [2, tokens], need each other, and here targets are "
            f"{list(shape)}; set model.loss={NAME} data.chosen=chosen data.rejected=rejected (names of fields), or none"
        )


def check_parameters(setup: Setup) -> None:
    """Check that there is a parameter to train. Raises TrainingError."""
    if setup.cfg.mode == "train" and setup.plan.parameters == 0:
        frozen = sum(parameter.numel() for parameter in setup.chain.skeleton().parameters())
        why = f"all {frozen:,} are frozen (requires_grad=False)" if frozen else "its layers have none"
        raise TrainingError(f"model={setup.cfg.model.name} has no parameters to train: {why}")


def check_optimizer_layout(setup: Setup) -> None:
    """Check that the optimizer works in the layout, with these parameters. Raises UserError."""
    if setup.cfg.mode in ("train", "plan"):
        check_layout(to_dict(setup.cfg.optim), setup.plan, setup.chain)
        check_others(to_dict(setup.cfg.optim), setup.chain)


def check_compile(setup: Setup) -> None:
    """Check that the model can be compiled if train.compile is set. Raises UserError."""
    if setup.cfg.train.compile:
        check_one_backward(setup.plan)
        check_compiler()


def check_one_backward(layout: Layout) -> None:
    """Check that a layout can run compiled layers. Raises TrainingError."""
    if layout.splits_backward:
        raise TrainingError(
            f"train.compile=true: a compiled layer has one backward, and parallel.schedule={layout.schedule} runs it "
            "in two parts; use parallel.schedule=interleaved_1f1b, or train.compile=false"
        )


def check_divided_data(setup: Setup) -> None:
    """Check that the ranks along each axis can divide the data's samples. Raises PlanError."""
    for _, axis in axes_of(setup.plan):
        axis.check_data(setup.plan, setup.data)


def across_nodes(setup: Setup) -> str | None:
    """Return a warning if ranks that send each other much data are on several machines; otherwise None."""
    plan, axes = setup.plan, axes_of(setup.plan)
    if setup.nodes == 1 or plan.ranks_per_stage == 1:
        return None
    sent = 4 * plan.microbatch_size * max((work.output for work in setup.work[0][:-1]), default=0.0)
    return next(filter(None, (axis.across_nodes(plan, setup.nodes, sent) for _, axis in axes)), None)


def unreached(setup: Setup) -> str | None:
    """Return a warning if a run ends before its modules are unfrozen or its weights averaged; otherwise None."""
    total, averaging = setup.total_steps, averaging_of(setup.cfg.callbacks)
    late = [name for name, step in frozen_until(setup.cfg.train.unfreeze, setup.chain).items() if step >= total]
    what = [f"train.unfreeze trains {name} only later" for name in late[:1]]
    if averaging is not None and not any(averaging.is_due(step, total) for step in range(1, total + 1)):
        what.append(f"callbacks: the first weights that {averaging.kind} averages come later")
    return f"this run ends after step {total}; {' and '.join(what)}" if what and setup.cfg.mode == "train" else None
