"""The configuration that a checkpoint keeps: a command that names the checkpoint need not repeat it.

It says what is trained, not where (see ``training.run.kept``): the option of each group, and every value. The
options stand behind what is typed when Hydra composes (``SavedConfig.words``), so that a model's file acts as it did;
then the values are laid under what was typed (``SavedConfig.lay_under``).

The values of a group count where that group has the option that they were trained with; another option, typed or
brought by an experiment, starts from its own defaults. They win over an experiment that the run had, and not over one
that it had not. A value that the files derive from others (``${train.global_batch_size}``) is left to them, as long as
that gives what the checkpoint has.
"""

from __future__ import annotations

import copy
import json
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
from conf import CHOSEN, FOLDER, ON_TOP, TRAINED, options
from conf.composition import config_folder, is_override, leaves
from conf.instantiate import PACKAGES, literal, targets, why_foreign
from models.chain import Chain
from training.checkpoint.files import MANIFEST, Checkpoint
from training.checkpoint.load import Tensors

_SHOWN = 4
# The YAML's own target; an indented one is that of a model, whose file sets other sections as well.
_TARGET = re.compile(r"^ *_target_: *([\w.]+)", re.MULTILINE)


def saved_config(arguments: Sequence[str]) -> SavedConfig | None:
    """Return the configuration of the checkpoint that a command line names; None where it names none.

    It may be named by ``checkpoint=``, ``train.resume=`` or, with ``train.resume=auto``, by the run directory.

    Raises:
        CheckpointError: There is no whole checkpoint where one is named.
        TrainingError: Another model was typed, or several checkpoints with different configurations.
    """
    try:
        typed = _typed(filter(is_override, arguments))
    except HydraException:
        return None  # Hydra says it better
    paths = _checkpoints(typed)
    configs = [_config_of(Path(path)) for path in paths]
    if not configs or configs[0] is None or _has_primary(arguments):
        return None
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
        words: The options of groups that were not typed, as words of a command line.
    """

    def __init__(
        self, path: str, config: Mapping[str, Any], typed: Mapping[str, Override], own: Path | None = None
    ) -> None:
        """Find out which options the checkpoint ``path``, which keeps ``config``, was trained with.

        ``typed`` are the overrides of the command line by key, ``own`` is the folder of the user's own options.
        """
        self._path, self._config = path, config
        self._folders = [folder for folder in (FOLDER, own) if folder is not None]
        self._options = {group: self._option(group, _values(typed.get(group))) for group in CHOSEN}
        known = {group: option for group, option in self._options.items() if option is not None and group not in typed}
        changed = set()
        for key in ON_TOP:
            for option in _values(typed.get(key)):
                if option != self._before(key):
                    changed |= self._groups_of(key, option) - {"model"}
        self.words = [f"{group}={option}" for group, option in known.items() if group not in changed]
        # Without a file, the section itself is the option, unless another one is wanted.
        self._whole = {group for group in CHOSEN if self._options[group] is None and group not in {*typed, *changed}}

    def lay_under(self, cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str]) -> None:
        """Put the values into ``cfg``, which was composed by ``choices``, under the ``overrides`` that were typed.

        Raises:
            TrainingError: A value names code that is neither this project's nor torch's, nor named by the command.
        """
        typed = _typed(overrides)
        raw = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
        same = [group for group in CHOSEN if group in self._whole or choices.get(group) == self._options[group]]
        sections, top = [*same, "train"], [key for key in ("seed", "recipe") if key in self._config]
        others = [(key, choices[key]) for key in ON_TOP if choices.get(key) not in (None, self._before(key))]
        winning = {*typed, *(leaf for key, option in others for leaf in self._leaves_of(key, option))}
        known = targets(raw)
        with flag_override(cfg, ["struct", "readonly"], False):
            derived = self._derived(cfg, raw, sections, top)
            for key in top:
                if key not in winning:
                    cfg[key] = literal(self._config[key])
            for section in self._whole:
                for key in [key for key in cfg[section] if key not in self._config[section]]:
                    cfg[section].pop(key)
            for section in sections:
                for key, value in self._config[section].items():
                    path = f"{section}.{key}"
                    if path in winning or path in derived:
                        continue
                    if path == "train.eval_batches" and raw["mode"] == "eval":
                        value = None  # the whole split, as in conf/model
                    below = {leaf: OmegaConf.select(cfg, leaf) for leaf in winning if leaf.startswith(f"{path}.")}
                    cfg[section][key] = literal(value)
                    _lay_again(cfg, below, typed)
        for section in sections:
            for target in targets(OmegaConf.to_container(cfg[section], resolve=False, enum_to_str=True)):
                if target not in known and (why := why_foreign(target)) is not None:
                    raise TrainingError(
                        f"{self._path} names {section}._target_={target}, which is not allowed, as {why}: a checkpoint "
                        f"may name public classes of {', '.join(PACKAGES)}. If you trust it, type "
                        f"{section}._target_={target}"
                    )

    def _derived(
        self, cfg: DictConfig, raw: Mapping[str, Any], sections: Sequence[str], top: Sequence[str]
    ) -> set[str]:
        """Return the keys that the files derive from others, where that gives what the checkpoint has."""
        whole = copy.deepcopy(cfg)
        whole.mode = "train"
        for key in top:
            whole[key] = literal(self._config[key])
        references = []
        for section in sections:
            for key, value in self._config[section].items():
                if "${" in json.dumps(raw[section].get(key), default=str):
                    references.append((section, key))
                else:
                    whole[section][key] = literal(value)
        return {f"{s}.{key}" for s, key in references if _resolved(whole[s], key) == self._config[s][key]}

    def _before(self, key: str) -> Any:
        return self._config.get("choices", {}).get(key)

    def _option(self, group: str, typed: Sequence[str]) -> str | None:
        """Return the option of a group that the checkpoint was trained with; None where its file is not there.

        An older checkpoint does not say it: it is one whose target is the section's.
        """
        target = self._config[group].get("_target_")
        said = self._config["model"].get("name") if group == "model" else self._before(group)
        if isinstance(said, str) and self._target(group, said) in (target, ""):
            return said
        names = (*typed, *options(group)) if said is None else ()
        return next((name for name in names if self._target(group, name) == target), None)

    def _file(self, group: str, option: str) -> Path | None:
        files = [folder / group / f"{option}.yaml" for folder in self._folders if re.fullmatch(r"[\w.-]+", option)]
        return next((file for file in files if file.is_file()), None)

    def _target(self, group: str, option: str) -> str | None:
        """Return the target that an option's file names; empty where it names none, None where there is no file."""
        file = self._file(group, option)
        named = None if file is None else _TARGET.search(file.read_text(encoding="utf-8"))
        return named[1] if named else None if file is None else ""

    def _groups_of(self, key: str, option: str) -> set[str]:
        """Return the groups whose option an experiment brings."""
        file = self._file(key, option)
        entries = OmegaConf.to_container(OmegaConf.load(file), resolve=False).get("defaults", []) if file else []
        return {str(one).split("/")[-1] for entry in entries if isinstance(entry, dict) for one in entry} & set(CHOSEN)

    def _leaves_of(self, key: str, option: str) -> list[str]:
        """Return the keys that an experiment sets."""
        file = self._file(key, option)
        return [] if file is None else list(leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False)))


def _lay_again(cfg: DictConfig, below: Mapping[str, Any], typed: Mapping[str, Override]) -> None:
    """Put back what was typed of a mapping that the checkpoint's has replaced."""
    for leaf, value in below.items():
        if leaf in typed and typed[leaf].is_delete():
            parent, _, name = leaf.rpartition(".")
            OmegaConf.select(cfg, parent).pop(name, None)
        else:
            OmegaConf.update(cfg, leaf, value, force_add=True)


def _typed(overrides: Any) -> dict[str, Override]:
    return {one.key_or_group: one for one in OverridesParser.create().parse_overrides(list(overrides))}


def _config_of(path: Path) -> dict[str, Any] | None:
    checkpoint = Checkpoint.find(path)
    if not _is_config(checkpoint.config):
        raise CheckpointError(f"{checkpoint.folder / MANIFEST} is damaged: config in it cannot be right")
    return checkpoint.config


def _is_config(config: Any) -> bool:
    """Return whether this is a configuration as checkpoints keep it: what is trained, not where, and nothing else."""
    if config is None:
        return True
    return (
        isinstance(config, dict)
        and config.keys() - {"choices", "recipe"} == {"seed", *TRAINED}
        and isinstance(config.get("choices", {}), dict)
        and all(isinstance(config[name], dict) and "defaults" not in config[name] for name in TRAINED)
        and isinstance(config["model"].get("name"), str)
    )


def _has_primary(arguments: Sequence[str]) -> bool:
    """Return whether the command names a composed configuration of its own, which is complete."""
    return any(argument.partition("=")[0] in ("--config-name", "-cn") for argument in arguments)


def _checkpoints(typed: Mapping[str, Override]) -> list[str]:
    """Return the checkpoints that the overrides name."""
    named = _values(typed.get("checkpoint")) or _values(typed.get("train.resume"))
    if named == ["auto"]:
        folders = _values(typed.get("hydra.run.dir"))
        found = [Checkpoint.newest(Path(folder) / "checkpoints") for folder in folders]
        return [str(checkpoint.folder) for checkpoint in found if checkpoint is not None]
    return [path for path in named if "${" not in path and path != "auto"]


def _values(override: Override | None) -> list[str]:
    """Return the text of an override's value, or of each value of a sweep; empty for none, null and other kinds."""
    if override is None:
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    texts = [value.text if isinstance(value, QuotedString) else value for value in values]
    return [text for text in texts if isinstance(text, str)]


def _resolved(section: Any, key: str) -> Any:
    try:
        value = section[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return OmegaConfBaseException  # equal to nothing in a checkpoint


def checkpoint_of(cfg: Any) -> Path:
    """Return what ``checkpoint`` names: a checkpoint, or a run directory, whose newest one is meant.

    Raises:
        TrainingError: Nothing is named. Whether it exists and is complete is checked by those who read it.
    """
    if cfg.checkpoint is None:
        raise TrainingError(
            f"mode={cfg.mode} needs checkpoint=PATH: a run directory, or one of its checkpoints, such as "
            "RUN_DIR/checkpoints/latest"
        )
    return Path(cfg.checkpoint)


def check_fits(path: Path, chain: Chain, cfg: Any) -> None:
    """Check that a checkpoint holds the model ``chain``, built from ``cfg``, by names and shapes: no tensor is read.

    Raises:
        CheckpointError: It does not. The message names the tensor, and the keys that differ from the checkpoint's.
    """
    from safetensors import SafetensorError

    checkpoint = Checkpoint.find(path)
    try:
        stored = Tensors(checkpoint)
        shapes = {name: tuple(stored[name].shape) for name in stored if "/" not in name}
    except (OSError, SafetensorError):
        return  # damaged: loading compares the checksums and names the file
    for name, tensor in chain.skeleton().state_dict().items():
        shape, expected = shapes.get(chain.canonical(name)), tuple(tensor.shape)
        if shape != expected:
            problem = "is not in it" if shape is None else f"has {shape}, expected {expected}"
            reasons = _differences(checkpoint.config, cfg)
            raise CheckpointError(f"{path} does not fit this model: {chain.canonical(name)} {problem}{reasons}")


def _differences(config: Mapping[str, Any] | None, cfg: Any) -> str:
    """Return the end of a message: which keys of model and data are not those of the checkpoint."""
    differing = [
        f"{section}.{key}={value} in the checkpoint and {cfg[section].get(key)} in this command"
        for section in ("model", "data")
        for key, value in (config or {}).get(section, {}).items()
        if cfg[section].get(key) != value
    ]
    return f"; {', '.join(differing[:_SHOWN])}" if differing else ""
