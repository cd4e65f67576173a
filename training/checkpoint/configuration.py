"""Restores the configuration that a checkpoint keeps, so that a command that names the checkpoint need not repeat it.

A checkpoint keeps the option of each group and every value that determine what is trained, not where it is trained
(see ``training.run.rank.kept``). They are restored in two steps. First, the options are put on the command line, before
the typed words, which override them, so that Hydra composes the files of the same options (``SavedConfig.words``).
Then, the checkpoint's values replace those of the files, and what was typed is put back (``SavedConfig.lay_under``).

The checkpoint's values of a group apply only if the group has the option that the checkpoint was trained with. Another
option, typed or selected by an experiment, starts from its own defaults. The checkpoint's values override an
``experiment=`` that the run was started with; another ``experiment=`` typed now overrides them. A value that the files
derive from others (``${train.global_batch_size}``) stays derived, as long as the result is the checkpoint's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from common.errors import CheckpointError, TrainingError
from conf import CHOSEN, FOLDER, ON_TOP, TRAINED
from conf.instantiate import PACKAGES, literal, targets, why_foreign
from conf.schema import Root
from conf.words import config_folder, parse
from training.checkpoint.files import MANIFEST, Checkpoint

_AT_ROOT = ("seed", "recipe")  # keys beside the sections
_NAMES_ONE = re.compile(r"\+*(checkpoint|train\.resume)=")


def saved_config(arguments: Sequence[str]) -> SavedConfig | None:
    """Return the configuration of the checkpoint that a command line names; None if it names none.

    A command line names a checkpoint by ``checkpoint=``, by ``train.resume=`` or, with ``train.resume=auto``, by the
    run directory.

    Raises:
        CheckpointError: The named path has no complete checkpoint.
        TrainingError: Another model was typed, or several checkpoints with different configurations.
    """
    if not any(map(_NAMES_ONE.match, arguments)):
        return None
    parsed = parse(arguments)
    try:
        typed = _typed(parsed.overrides)
    except HydraException:
        return None  # Hydra raises a better message
    paths = _checkpoints(typed)
    if not paths or parsed.config_name is not None:
        return None  # --config-name names a composed configuration, which is complete
    configs = [_config_of(Path(path)) for path in paths]
    if any(config != configs[0] for config in configs):
        raise TrainingError(f"{', '.join(paths)} have different configurations; name one of them at a time")
    model, wanted = configs[0]["model"].get("name"), _values(typed.get("model"))
    if any(word != model for word in wanted):
        raise TrainingError(
            f"{paths[0]} holds model={model}, and model={','.join(wanted)} was typed; leave model= out, or name a "
            "checkpoint of that model"
        )
    return SavedConfig(paths[0], configs[0], typed, config_folder(arguments))


class SavedConfig:
    """The configuration of a checkpoint that a command names.

    Attributes:
        words: The checkpoint's options of the groups that were not typed, as words of a command line.
    """

    def __init__(
        self, path: str, config: Mapping[str, Any], typed: Mapping[str, Override], own: Path | None = None
    ) -> None:
        """Find out which options the run was trained with.

        Args:
            path: The checkpoint.
            config: The configuration that the checkpoint keeps.
            typed: The overrides of the command line, by key.
            own: The folder of the user's options; None if there is none.
        """
        self._path, self._config = path, config
        self._folders = [folder for folder in (FOLDER, own) if folder is not None]
        self._had = {"model": config["model"]["name"], **config.get("choices", {})}
        for group in set(CHOSEN) - self._had.keys():  # older checkpoints and those of a program lack them
            files = [file.stem for folder in self._folders for file in sorted((folder / group).glob("*.yaml"))]
            read = {option: self._read(group, option) for option in (*_values(typed.get(group)), *files)}
            same = [o for o, file in read.items() if file.get("_target_") == config[group].get("_target_")]
            # Of several, the one from which the fewest values differ.
            alike = {o: sum(config[group].get(key) == value for key, value in read[o].items()) for o in same}
            self._had[group] = max(same, key=alike.__getitem__, default=None)
        experiments = [(key, option) for key in ON_TOP for option in _values(typed.get(key))]
        new = [self._read(key, option) for key, option in experiments if self._is_new(key, option)]
        self._chosen = {*typed, *(group for file in new for group in _groups_of(file))} & {*CHOSEN}
        left = {group: self._had.get(group) for group in CHOSEN if group not in self._chosen}
        self.words = [f"{group}={option}" for group, option in left.items() if self._read(group, option)]

    def lay_under(self, cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str]) -> None:
        """Set the checkpoint's values in ``cfg``, except for keys that were typed.

        Args:
            cfg: The composed configuration, which is changed.
            choices: The option of each group that it was composed of.
            overrides: The typed words.

        Raises:
            TrainingError: A value names code that is neither this project's nor torch's, nor named by the command.
        """
        typed, config = _typed(overrides), self._config
        raw: Any = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
        sections = [
            "train",
            *(group for group in CHOSEN if group not in self._chosen or choices.get(group) == self._had[group]),
        ]
        values = {f"{section}.{key}": value for section in sections for key, value in config[section].items()}
        values |= {key: config[key] for key in _AT_ROOT if key in config}
        if raw["mode"] == "eval":
            values["train.eval_batches"] = None  # the whole split, as in conf/model
        with flag_override(cfg, ["struct", "readonly"], False):
            for group in sections[1:]:
                same_target = raw[group].get("_target_") == config[group].get("_target_")
                if choices.get(group) != self._had[group] or not same_target:  # the option's file is missing
                    cfg[group] = {}
            for key, value in values.items():
                OmegaConf.update(cfg, key, literal(value), merge=False)
            for key, value in values.items():
                section, _, name = key.rpartition(".")
                if section and "${" in str(raw[section].get(name)):
                    OmegaConf.update(cfg, key, raw[section][name], merge=False)
                    if _resolved(cfg, key) != value:
                        OmegaConf.update(cfg, key, literal(value), merge=False)
            for key in ON_TOP:
                if self._is_new(key, choices.get(key)):
                    file = self._read(key, choices.get(key))
                    cfg.merge_with({name: file[name] for name in (*sections, *_AT_ROOT) if name in file})
            for key in typed:
                section, _, name = key.partition(".")
                if key in _AT_ROOT or (name and section in sections):
                    _put_back(cfg, raw, key)
        for key in config.get("left_out", ()):  # by masking: a secret, or from the environment
            if key.partition(".")[0] in sections and OmegaConf.select(cfg, key) is None:
                raise TrainingError(f"{self._path} does not keep {key}, whose value was masked: type {key}= again")
        for section in sections:
            foreign = set(targets(OmegaConf.to_container(cfg[section], resolve=False, enum_to_str=True)))
            for target in foreign - set(targets(raw)):
                if (why := why_foreign(target)) is not None:
                    raise TrainingError(
                        f"{self._path} names {section}._target_={target}, which is not allowed, as {why}: a checkpoint "
                        f"may name public classes of {', '.join(PACKAGES)}. If you trust it, type "
                        f"{section}._target_={target}"
                    )

    def _is_new(self, key: str, option: Any) -> bool:
        """Return whether the run was not started with this experiment."""
        return option is not None and option != self._had.get(key)

    def _read(self, group: str, option: Any) -> dict[str, Any]:
        """Return the content of an option's file; empty if there is no file."""
        if isinstance(option, str) and re.fullmatch(r"[\w.-]+", option):
            for file in (folder / group / f"{option}.yaml" for folder in self._folders):
                if file.is_file():
                    tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
                    return tree
        return {}


def _put_back(cfg: DictConfig, raw: Any, key: str) -> None:
    """Set the value of a typed key as it was composed, or delete the key if it was deleted."""
    *parents, name = key.split(".")
    for parent in parents:
        raw = raw.get(parent, {})
    if name in raw:
        OmegaConf.update(cfg, key, raw[name], merge=False, force_add=True)
    else:
        OmegaConf.select(cfg, ".".join(parents)).pop(name, None)


def _groups_of(file: Mapping[str, Any]) -> set[str]:
    """Return the groups whose option an experiment's file selects."""
    entries = [entry for entry in file.get("defaults", []) if isinstance(entry, dict)]
    return {str(key).split("/")[-1] for entry in entries for key in entry}


def _typed(overrides: Any) -> dict[str, Override]:
    return {override.key_or_group: override for override in OverridesParser.create().parse_overrides(list(overrides))}


def _config_of(path: Path) -> dict[str, Any]:
    """Return the configuration that a checkpoint keeps."""
    checkpoint = Checkpoint.find(path)
    config: Any = checkpoint.config if isinstance(checkpoint.config, dict) else {}
    sections = [config.get("choices", {}), *map(config.get, TRAINED)]
    if not all(isinstance(one, dict) for one in sections) or not isinstance(config["model"].get("name"), str):
        raise CheckpointError(f"{checkpoint.folder / MANIFEST} is damaged: its config is not a configuration")
    return config


def _checkpoints(typed: Mapping[str, Override]) -> list[str]:
    """Return the checkpoints that the overrides name."""
    named = _values(typed.get("checkpoint")) or _values(typed.get("train.resume"))
    if named == ["auto"]:
        folders = _values(typed.get("hydra.run.dir"))
        found = [Checkpoint.newest(Path(folder) / "checkpoints") for folder in folders]
        return [str(checkpoint.folder) for checkpoint in found if checkpoint is not None]
    return [path for path in named if "${" not in path and path != "auto"]


def _values(override: Override | None) -> list[str]:
    """Return the text of an override's value, or of each value of a sweep, without null and values of other types."""
    if override is None:
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    texts = [value.text if isinstance(value, QuotedString) else value for value in values]
    return [text for text in texts if isinstance(text, str)]


def _resolved(cfg: DictConfig, key: str) -> Any:
    try:
        value = OmegaConf.select(cfg, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return OmegaConfBaseException  # differs from every value in a checkpoint


def checkpoint_of(cfg: Root) -> Path:
    """Return the path in ``checkpoint``: a checkpoint, or a run directory, which stands for its newest checkpoint.

    Whether it exists and is complete is checked where it is read.

    Raises:
        TrainingError: ``checkpoint`` is null.
    """
    if cfg.checkpoint is None:
        raise TrainingError(f"mode={cfg.mode} needs checkpoint=PATH: a run directory, or RUN_DIR/checkpoints/latest")
    return Path(cfg.checkpoint)
