"""Training from a Python program or a notebook, by words of the command line and objects (docs/python.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from common.errors import TrainingError, UserError
from common.namesakes import check_folder
from conf import EVALUATES
from conf.composition import Composed, compose
from conf.instantiate import check_role
from conf.messages import explain
from conf.words import hydra_word, key_of
from launchers import World, stopping
from models.given import GIVEN, set_given
from training.checkpoint.configuration import saved_config
from training.command.app import execute, plain, run_words
from training.command.caller import left_as_it_was
from training.reporting.metrics import METRICS, SUMMARY, read_object, read_records

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.dataset import DataSet
    from models.chain import Chain
    from training.studies.verification.report import Report

_SWEEPS = {"-m", "--multirun"}


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        run_dir: The run directory.
        summary: The content of summary.json; empty for a mode that does not write it, such as plan.
        evaluated: The checkpoint that mode=eval has evaluated; otherwise None.
        given: The objects in place of ``model=`` and ``data=``.
    """

    run_dir: Path
    summary: dict[str, Any]
    evaluated: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return read_records(self.run_dir / METRICS)

    def state_dict(self, which: str = "last") -> dict[str, Tensor]:
        """Read the "last" or the "best" weights of the run; see ``load``. Of mode=eval, "last" are those evaluated."""
        return load(self.evaluated if self.evaluated and which == "last" else self.run_dir, which)

    def predict(self, inputs: Any = "test", *overrides: str, which: str = "last") -> Any:
        """Compute with the weights of the run, in this process and in evaluation mode.

        The batches have ``train.global_batch_size`` samples.

        Args:
            inputs: An array or a tensor [n, ...] as the model takes it, or a tuple of these for several inputs; or
                "train", "val" or "test" for these samples of the run's data.
            *overrides: Words of the command line, such as "device=cpu", "train.global_batch_size=8" or
                "sample.temperature=0".
            which: See ``state_dict``.

        Returns:
            What the last layer returns, as an array [n, ...] or a tuple of arrays. Of a split of texts, a list of the
            rows that mode=predict writes, as dicts.

        Raises:
            UserError: There are no such weights or samples.
        """
        checkpoint = _folder(self.evaluated if self.evaluated and which == "last" else self.run_dir, which)

        def act(composed: Composed) -> Any:
            from training.run.predict import predictions

            return predictions(plain(composed).cfg, inputs, composed.run_dir)

        with TemporaryDirectory() as folder:  # a run directory
            words = ["mode=predict", f"checkpoint={hydra_word(str(checkpoint))}", f"hydra.run.dir={hydra_word(folder)}"]
            return _run_words(act, [*words, *overrides], None, self.given.get("model"), self.given.get("data"))


def load(run: str | Path, which: str = "last") -> dict[str, Tensor]:
    """Read the weights of a run by the names of the whole model, for ``load_state_dict`` of the given model.

    With ``model.lora.rank``, these are the matrices of the adapters.

    Args:
        run: The run directory, or a checkpoint in it.
        which: "last", or "best" by ``train.monitor``.

    Raises:
        TrainingError: ``which`` is something else.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    from training.checkpoint.load import read_weights

    return read_weights(_folder(run, which))


def _folder(run: str | Path, which: str) -> Path:
    """Return the folder of the "last" or the "best" weights. Raises TrainingError if ``which`` is something else."""
    if which not in ("last", "best"):
        raise TrainingError(f'a run keeps its "last" and its "best" weights, not {which!r}')
    return Path(run) / "checkpoints" / "best" if which == "best" else Path(run)


def load_config(*overrides: str) -> Any:
    """Compose a configuration without running it.

    Args:
        *overrides: Words of the command line, such as "model=gpt2" and "train.steps=10".

    Returns:
        The configuration. Read or change it: ``cfg.train.steps = 20``; ``train(config=cfg)`` runs it.

    Raises:
        UserError: A word is wrong; the message names the nearest existing key or option.
    """
    _check_words(overrides)
    with _user_errors():
        return compose(overrides, saved=saved_config(overrides))


def train(
    *overrides: str,
    config: Any = None,
    model: Chain | nn.Module | None = None,
    loss: Any = None,
    data: DataSet | tuple | None = None,
) -> Result:
    """Run what ``python train.py *overrides`` runs, and return its results.

    Workers are separate processes, so notebooks and scripts without ``if __name__ == "__main__"`` may call this. A run
    of one process runs in the calling process.

    Args:
        *overrides: Words of the command line.
        config: A configuration from ``load_config``. It replaces the words; only keys of Hydra may be given as words
            beside it, such as "hydra.run.dir=runs/a".
        model: A model in place of ``model=``: an ``nn.Sequential`` (each child is a layer), another ``nn.Module`` (one
            layer) or a ``Chain``. Choose data, optimizer and steps by overrides: there is no YAML file of the model
            that selects them.
        loss: The loss of ``model``, such as ``torch.nn.CrossEntropyLoss()`` or a loss of ``models.losses``; a ``Chain``
            has one already.
        data: A data set in place of ``data=``, such as ``data.tensors.TensorData(inputs, targets)``, or
            ``(inputs, targets)`` for short.

    Returns:
        The run's directory and its summary.

    Raises:
        UserError: An error that the command line reports as a message.
        KeyboardInterrupt: The run was interrupted; its processes have ended.
    """
    chain = _chain_of(model, loss)

    def act(composed: Composed) -> Result:
        execute(composed)
        cfg, run_dir = composed.plain(), composed.run_dir
        evaluated = Path(cfg.checkpoint) if cfg.mode in EVALUATES else None
        given = {key: one for key, one in (("model", chain), ("data", data)) if one is not None}
        return Result(run_dir, read_object(run_dir / SUMMARY), evaluated, given)

    return _run_words(act, overrides, config, chain, data)


def verify(
    *overrides: str,
    config: Any = None,
    model: Chain | nn.Module | None = None,
    loss: Any = None,
    data: DataSet | tuple | None = None,
) -> Report:
    """Verify a model under every layout, as ``python train.py mode=verify *overrides`` does.

    Args:
        *overrides: Words of the command line. With ``parallel=NAME``, only that layout is verified.
        config: See ``train``.
        model: See ``train``.
        loss: See ``train``.
        data: See ``train``.

    Returns:
        The report. ``report.ok`` is true if all checks passed; ``str(report)`` describes failed checks.

    Raises:
        UserError: No run could use the words, the model or the data.
    """
    words = ["mode=verify", *(word for word in overrides if not word.startswith("mode="))]
    typed = [key_of(word) for word in overrides]
    if config is not None:  # all of its values count as the user's choice
        words, typed = list(overrides), ["train.precision", "train.global_batch_size", "parallel"]

    def act(composed: Composed) -> Report:
        from training.studies.verification.report import prove

        return prove(plain(composed).cfg, composed.run_dir, typed)

    return _run_words(act, words, config, _chain_of(model, loss), data)


def _chain_of(model: Any, loss: Any) -> Any:
    """Return a model with its loss as a chain. Another object is returned unchanged; ``_checked`` refuses it."""
    if model is None and loss is None:
        return None
    from torch import nn

    from models.chain import Chain
    from models.losses import copy_to_try
    from models.sequential import chain_of

    loss = copy_to_try(loss)  # a run does not change the caller's objects
    if isinstance(model, Chain) and loss is not None:
        return model.with_loss(loss)
    if isinstance(model, nn.Module):
        if loss is None:
            raise TrainingError("a module has no loss: train(model=net, loss=torch.nn.CrossEntropyLoss(), data=...)")
        return chain_of(model, loss)
    if loss is not None:
        raise TrainingError("loss= belongs to model=, an object; with words, write 'model.loss={_target_: ...}'")
    return model


def _run_words(
    act: Callable[..., Any], overrides: Sequence[str], config: Any, model: Any, data: DataSet | tuple | None
) -> Any:
    """Compose the words of a call of ``train`` and return ``act(composed)``."""
    check_folder(os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", "notebook"))))
    _check_words(overrides)
    if _SWEEPS & set(overrides):
        raise TrainingError("train() is one run, not a sweep (-m): call it once for each value")
    if config is not None and not OmegaConf.is_config(config):
        raise TrainingError(
            f"config= takes the result of load_config, not a {type(config).__name__}: "
            'config = load_config("model=gpt2"); config.train.steps = 10'
        )
    if config is not None and any(not word.startswith("hydra.") for word in overrides):
        raise TrainingError("with config=, change the configuration itself; only hydra.… may be given as words")
    if config is not None and (resume := OmegaConf.select(config, "train.resume")) is not None:
        overrides = [*overrides, f"train.resume={hydra_word(resume)}"]  # for the check of the run directory
    objects = _checked(overrides, model, data)
    program = partial(with_given, objects=objects, config=config) if config is not None or objects else None
    set_given(objects)
    try:
        with _user_errors(), left_as_it_was(), stopping.handled():
            return run_words(overrides, act, program)
    finally:
        set_given(None)


def _check_words(overrides: Sequence[Any]) -> None:
    for word in overrides:
        if not isinstance(word, str):
            raise TrainingError(
                f"a {type(word).__name__} is not a word of the command line; words are given one by one, such as "
                'train("model=gpt2", "train.steps=10"), and objects as train(model=..., data=...)'
            )


def _checked(overrides: Sequence[str], model: Any, data: Any) -> dict[str, Any]:
    """Check the given objects and return them by key."""
    if isinstance(data, tuple) and len(data) == 2:
        from data.tensors import TensorData

        data = TensorData(*data)
    objects = {key: one for key, one in (("model", model), ("data", data)) if one is not None}
    for key, one in objects.items():
        check_role(key, one)
        for word in overrides:
            if word.startswith(f"{key}="):
                raise TrainingError(f"{key} is given twice: by {word!r} and by {key}=...; leave one of them out")
            if word.lstrip("+~").startswith(f"{key}.") and not word.startswith(("model.init_from=", "model.lora.")):
                raise TrainingError(f"{word!r} has no effect on the {key} that is given as an object: leave it out")
    return objects


def with_given(cfg: DictConfig, objects: dict[str, Any], config: Any = None) -> Any:
    """Return a copy of ``config``, or of ``cfg`` if it is None, with sections that name the given objects."""
    tree = OmegaConf.to_container(cfg if config is None else config, resolve=False, enum_to_str=True)
    cfg = DictConfig(tree)
    if objects and World.detect() is None and cfg.launcher.name == "slurm":
        raise TrainingError("objects of a Python program exist on this machine only: use launcher=local")
    kept = {key: OmegaConf.select(cfg, f"model.{key}") for key in ("init_from", "lora")}
    for key, one in objects.items():
        cfg[key] = {"_target_": GIVEN, "key": key, "fingerprint": getattr(one, "fingerprint", "")}
    if "model" in objects:
        cfg.model.update(name="given", **kept)
        cfg.recipe = None  # it belongs to the model that this one replaces
        vocabulary = objects["model"].limits.get("vocabulary")
        if vocabulary is not None:
            cfg.model.vocab_size = vocabulary
    return cfg


@contextmanager
def _user_errors() -> Iterator[None]:
    """Convert errors that the user can act on to UserError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or (message := explain(error)) is None:
            raise
        raise TrainingError(message) from None
