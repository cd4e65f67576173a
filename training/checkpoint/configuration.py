"""Restores the configuration that a checkpoint keeps, so that a command that names the checkpoint need not repeat it.

A checkpoint keeps the option of each group and all values that determine what is trained, but not where it is trained
(see ``training.run.rank.kept``). A saved value applies unless its key was typed, or its group now has another option
than in the run. The saved options become words before the typed words, so that Hydra reads the files of the same
options (``SavedConfig.words``). The saved values replace the files' values before Hydra applies the typed words
(``SavedConfig.lay_over``).

The values of an experiment count as typed if the run was started without this experiment. A value that the files derive
from other values (``${train.global_batch_size}``) stays derived if the result equals the saved value.
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
from conf import CHOSEN, EVALUATES, FOLDER, ON_TOP, TRAINED
from conf.instantiate import PACKAGES, literal, targets, why_foreign
from conf.schema import Root
from conf.words import config_folder, parse
from training.checkpoint.files import MANIFEST, Checkpoint

_AT_ROOT = ("seed", "recipe", "metrics")  # keys beside the sections
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
    return SavedConfig(paths[0], configs[0], config_folder(arguments))


class SavedConfig:
    """The configuration in a checkpoint, for a command with ``checkpoint=`` or ``train.resume=``."""

    def __init__(self, path: str, config: Mapping[str, Any], own: Path | None = None) -> None:
        """Store the configuration and its source.

        Args:
            path: The checkpoint's path.
            config: The configuration that the checkpoint keeps.
            own: The folder of the user's options; None if there is none.
        """
        self._path, self._config = path, config
        self._folders = [folder for folder in (FOLDER, own) if folder is not None]
        self._had = {"model": config["model"]["name"], **config.get("choices", {})}
        for group in set(CHOSEN) - self._had.keys():  # of a Python program: the option with the fewest differing values
            section, alike = config[group], {}
            for file in (file for folder in self._folders for file in sorted((folder / group).glob("*.yaml"))):
                content = self._read(group, file.stem)
                if content.get("_target_") == section.get("_target_"):
                    alike[file.stem] = sum(section.get(key) == value for key, value in content.items())
            self._had[group] = max(alike, key=alike.__getitem__, default=None)

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the options of the groups that the typed ``words`` leave open, as words of a command line."""
        chosen = self._chosen(_typed(words))
        left = {group: self._had[group] for group in CHOSEN if group not in chosen}
        return [f"{group}={option}" for group, option in left.items() if self._read(group, option)]

    def lay_over(self, cfg: DictConfig, words: Sequence[str]) -> None:
        """Replace the files' values in ``cfg`` by the checkpoint's values.

        Args:
            cfg: The configuration from the files. It is changed in place.
            words: The typed words. Hydra applies them later.

        Raises:
            TrainingError: A value was masked, or names code that is not this project's or torch's and was not typed.
        """
        typed, config = _typed(words), self._config
        chosen, files = self._chosen(typed), _plain(cfg)
        sections = ["train", *(group for group in CHOSEN if chosen.get(group, self._had[group]) == self._had[group])]
        values = {f"{section}.{key}": value for section in sections for key, value in config[section].items()}
        values |= {key: config[key] for key in _AT_ROOT if key in config}
        modes = {*(_values(typed.get("mode")) or [files["mode"]])}
        if {*EVALUATES} & modes:
            values["train.eval_batches"] = None  # the whole split, as in conf/model
        if not {"train", "eval"} & modes:
            values.pop("metrics", None)  # they may be code that a checkpoint must not name, and nothing is measured
        others = [group for group in sections[1:] if self._differs(group, files[group])]
        of_new = {f"{part}.{key}" for file in self._new(typed) for part in sections for key in file.get(part, {})}
        of_new |= {key for file in self._new(typed) for key in _AT_ROOT if key in file}
        for key in [key for key in values if key in {*typed, *of_new} and key.partition(".")[0] not in others]:
            del values[key]
        with flag_override(cfg, ["struct", "readonly"], False):
            for group in others:
                cfg[group] = {}
            for key, value in values.items():
                OmegaConf.update(cfg, key, literal(value), merge=False)
            for key, value in values.items():
                section, _, name = key.rpartition(".")
                if section and "${" in str(derived := files[section].get(name)):
                    OmegaConf.update(cfg, key, derived, merge=False)
                    if _resolved(cfg, key) != value:
                        OmegaConf.update(cfg, key, literal(value), merge=False)
        for key in config.get("left_out", ()):  # masked keys: secrets, or values from the environment
            if key.partition(".")[0] in sections and key not in typed and OmegaConf.select(cfg, key) is None:
                raise TrainingError(f"{self._path} does not keep {key}, whose value was masked: type {key}= again")
        given = {*targets([files, *({key.split(".")[-1]: one.value()} for key, one in typed.items())])}
        for section in [*sections, "metrics"]:
            for target in {*targets(_plain(cfg)[section])} - given:
                if section == "metrics" and "." not in str(target):
                    continue  # a class of torchmetrics
                if (why := why_foreign(target)) is not None:
                    raise TrainingError(
                        f"{self._path} names {section}._target_={target}, which is not allowed, as {why}: a checkpoint "
                        f"may name public classes of {', '.join(PACKAGES)}. If you trust it, type "
                        f"{'metrics= again' if section == 'metrics' else f'{section}._target_={target}'}"
                    )

    def _chosen(self, typed: Mapping[str, Override]) -> dict[str, Any]:
        """Return the option of each group that was typed, or that an experiment of ``_new`` chooses."""
        entries = [entry for file in self._new(typed) for entry in file.get("defaults", []) if isinstance(entry, dict)]
        by_file = {str(key).split("/")[-1]: option for entry in entries for key, option in entry.items()}
        by_word = {group: next(iter(_values(typed[group])), None) for group in CHOSEN if group in typed}
        return {group: option for group, option in (by_file | by_word).items() if group in CHOSEN}

    def _new(self, typed: Mapping[str, Override]) -> list[dict[str, Any]]:
        """Return the contents of the files of typed experiments, except experiments that the run already had."""
        options = ((key, option) for key in ON_TOP for option in _values(typed.get(key)))
        return [self._read(key, option) for key, option in options if option != self._had.get(key)]

    def _differs(self, group: str, section: Mapping[str, Any]) -> bool:
        """Return whether a section does not belong to the checkpoint's option, for instance if the file is missing."""
        return not self._read(group, self._had[group]) or section.get("_target_") != self._config[group].get("_target_")

    def _read(self, group: str, option: Any) -> dict[str, Any]:
        """Return the content of an option's file; empty if there is no file."""
        if isinstance(option, str) and re.fullmatch(r"[\w.-]+", option):
            for file in (folder / group / f"{option}.yaml" for folder in self._folders):
                if file.is_file():
                    tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
                    return tree
        return {}


def _plain(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)


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
    """Return the value of an override, or each value of a sweep. Values that are not text (null) are left out."""
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

    The reader of the path checks whether the checkpoint exists and is complete.

    Raises:
        TrainingError: ``checkpoint`` is null.
    """
    if cfg.checkpoint is None:
        raise TrainingError(f"mode={cfg.mode} needs checkpoint=PATH: a run directory, or RUN_DIR/checkpoints/latest")
    return Path(cfg.checkpoint)
