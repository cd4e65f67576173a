"""The configuration that a checkpoint keeps: a command that names the checkpoint need not repeat it.

It says what is trained, not where (see ``training.config.kept``): the option of each group, and every value.
``with_checkpoint`` has Hydra compose the same options again, so that a model's file acts as it did, and puts the values
on top of what the files say. What is typed comes last and wins.

The values of a group count where that group has the option that they were trained with; another option, typed or
brought by an experiment, starts from its own defaults. They stand on top of an experiment that the run had, and below
one that it had not. A value that the files derive from others (``${train.global_batch_size}``) is left to them, as long
as that gives what the checkpoint has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import CheckpointError, TrainingError
from conf import CHOSEN, OF_CHECKPOINT, ON_TOP, TRAINED, options
from conf.composition import compose
from conf.instantiate import PACKAGES, targets, why_foreign
from conf.schema import target_of
from conf.words import config_folder, literal
from models.chain import Chain
from training.checkpoint.files import MANIFEST, Checkpoint
from training.checkpoint.load import Tensors

_SHOWN = 4
_VALUES = "values"  # the option of OF_CHECKPOINT while a checkpoint is named
_SECTIONS = re.compile(rf"\+(?=({'|'.join(TRAINED)})\.)")


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Adds the configuration of the checkpoint that a command line names to the command line.

    Args:
        arguments: What was typed, without the program's name.

    Returns:
        The arguments, with the options of the groups and ``of_checkpoint=values`` where ``checkpoint=``,
        ``train.resume=`` or, by ``train.resume=auto``, the run directory has a checkpoint that keeps its configuration.

    Raises:
        CheckpointError: There is no whole checkpoint where one is named.
        TrainingError: Another model was typed, or several checkpoints with different configurations.
    """
    try:
        typed = {o.key_or_group: o for o in OverridesParser.create().parse_overrides(_overrides(arguments))}
    except HydraException:
        return list(arguments)  # Hydra says it better
    paths = _checkpoints(typed)
    configs = [_config_of(Path(path)) for path in paths]
    if not configs or configs[0] is None or _has_primary(arguments):
        return list(arguments)
    if any(config != configs[0] for config in configs):
        raise TrainingError(f"{', '.join(paths)} have different configurations; name one of them at a time")
    config = configs[0]
    model, wanted = config["model"].get("name"), _values(typed.get("model"))
    if any(word != model for word in wanted):
        raise TrainingError(
            f"{paths[0]} holds model={model}, and model={','.join(wanted)} was typed; leave model= out, or name a "
            "checkpoint of that model"
        )
    store = ConfigStore.instance()
    places = store.repo.get(OF_CHECKPOINT, {})
    for name in [name for name, entry in places.items() if isinstance(entry, dict)]:
        del places[name]  # of a command before
    store.store(group=OF_CHECKPOINT, name=_VALUES, node={}, package="_global_")
    chosen = {group: _option(group, config, typed, arguments) for group in CHOSEN}
    before = config.get("choices", {})
    again = [key for key in ON_TOP if key in typed and _choice(typed[key]) == before.get(key) is not None]
    others = [key for key in ON_TOP if key in typed and key not in again]
    base = compose([*_words(chosen), *_typed_as(again, arguments)], arguments)
    _check_targets(paths[0], config, arguments)
    _store(_known(config, base, typed), _top(config), chosen, _place(again, others))
    untyped = {group: option for group, option in chosen.items() if group not in typed or group == "model"}
    if others and not typed.keys() >= set(CHOSEN):
        changed = _changed_by(_typed_as(others, arguments), untyped["model"], arguments)
        untyped = {group: option for group, option in untyped.items() if group not in changed}
    rest = [_repeatable(word, config, typed) for word in arguments if not (wanted and _key(word) == "model")]
    return [*_words(untyped), f"{OF_CHECKPOINT}={_VALUES}", *filter(None, rest)]


def _config_of(path: Path) -> dict[str, Any] | None:
    checkpoint = Checkpoint.find(path)
    if not _is_config(checkpoint.config):
        raise CheckpointError(f"{checkpoint.folder / MANIFEST} is damaged: config in it cannot be right")
    return checkpoint.config


def _is_config(config: Any) -> bool:
    """Returns whether it is what a run keeps of its configuration: what is trained, not where, nor what else."""
    if config is None:
        return True
    return (
        isinstance(config, dict)
        and config.keys() - {"choices", "recipe"} == {"seed", *TRAINED}
        and isinstance(config.get("choices", {}), dict)
        and all(isinstance(config[name], dict) and "defaults" not in config[name] for name in TRAINED)
        and isinstance(config["model"].get("name"), str)
    )


def _check_targets(path: str, config: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raises TrainingError where a checkpoint names code that is not this project's, torch's or in the user's files."""
    own = config_folder(arguments)
    files = [] if own is None else [file.read_text() for group in CHOSEN for file in (own / group).glob("*.yaml")]
    for section in CHOSEN:
        for target in targets(config[section]):
            if any(str(target) in text for text in (*arguments, *files)) or (why := why_foreign(target)) is None:
                continue
            raise TrainingError(
                f"{path} names {section}._target_={target}, which is not allowed, as {why}: a checkpoint may name "
                f"public classes of {', '.join(PACKAGES)}. If you trust it, type {section}._target_={target}"
            )


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if "=" in argument and not argument.startswith("-")]


def _has_primary(arguments: Sequence[str]) -> bool:
    """Returns whether the command names a composed configuration of its own, which is complete."""
    return any(argument.partition("=")[0] in ("--config-name", "-cn") for argument in arguments)


def _checkpoints(typed: Mapping[str, Override]) -> list[str]:
    """Returns the checkpoints that the overrides name."""
    named = _values(typed.get("checkpoint")) or _values(typed.get("train.resume"))
    if named == ["auto"]:
        folders = _values(typed.get("hydra.run.dir"))
        found = [Checkpoint.newest(Path(folder) / "checkpoints") for folder in folders]
        return [str(checkpoint.folder) for checkpoint in found if checkpoint is not None]
    return [path for path in named if "${" not in path and path != "auto"]


def _values(override: Override | None) -> list[str]:
    """Returns the text of an override's value, or of each value of a sweep; empty for none, null and other kinds."""
    if override is None:
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    texts = [value.text if isinstance(value, QuotedString) else value for value in values]
    return [text for text in texts if isinstance(text, str)]


def _choice(override: Override) -> Any:
    """Returns the option, or the list of options, that an override chooses; None for several jobs' options."""
    value = None if override.is_sweep_override() else override.value()
    return value.text if isinstance(value, QuotedString) else value


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _words(chosen: Mapping[str, str]) -> list[str]:
    return [f"{group}={option}" for group, option in chosen.items()]


def _typed_as(keys: Sequence[str], arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if _key(word) in keys]


def _option(group: str, config: Mapping[str, Any], typed: Mapping[str, Override], arguments: Sequence[str]) -> str:
    """Returns the option of a group that a checkpoint was trained with.

    Where its file is not there, the checkpoint's section itself becomes the option ``of_checkpoint``. An older
    checkpoint does not say the option: it is one whose target is the section's.
    """
    target = config[group].get("_target_")
    own = config_folder(arguments)
    said = config["model"].get("name") if group == "model" else config.get("choices", {}).get(group)
    if isinstance(said, str) and target_of(group, said, own) in (target, ""):
        return said
    if said is None:
        for name in (*_values(typed.get(group)), *options(group)):
            if target_of(group, name, own) == target:
                return name
    store, node = ConfigStore.instance(), literal(config[group])
    if group == "model":  # whose options set other sections as well
        store.store(group=group, name=OF_CHECKPOINT, node={group: node}, package="_global_")
    else:
        store.store(group=group, name=OF_CHECKPOINT, node=node)
    return OF_CHECKPOINT


def _place(again: Sequence[str], others: Sequence[str]) -> str:
    """Returns where the values stand among what is typed on top of the groups: what the run had is below them."""
    if "experiment" in others:
        return "below_experiment"
    return "on_top" if "debug" in again else "below_debug"


def _changed_by(words: Sequence[str], model: str, arguments: Sequence[str]) -> set[str]:
    """Returns the groups whose option an experiment brings, or one of those of a sweep."""
    without = compose([f"model={model}"], arguments, with_hydra=True).hydra.runtime.choices
    changed = set()
    for override in OverridesParser.create().parse_overrides(list(words)):
        for value in _values(override):
            choices = compose([f"model={model}", f"{override.key_or_group}={value}"], arguments, with_hydra=True)
            choices = choices.hydra.runtime.choices
            changed |= {group for group in CHOSEN if choices[group] != without[group]}
    return changed


def _repeatable(word: str, config: Mapping[str, Any], typed: Mapping[str, Override]) -> str:
    """Returns a word as it can be typed where what it adds or takes away is added or gone; empty for nothing left."""
    if word.startswith("~"):
        *parents, name = word[1:].partition("=")[0].split(".")
        node: Any = config
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        gone = len(parents) > 1 and isinstance(node, dict) and name not in node
        return "" if gone and ".".join(parents[:2]) not in typed else word
    return _SECTIONS.sub("++", word, count=1) if not word.startswith("++") else word


def _top(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are in no section. What a model's recipe gives stays, whatever else is typed."""
    return {name: literal(config[name]) for name in ("seed", "recipe") if name in config}


def _store(known: Mapping[str, dict[str, Any]], top: Mapping[str, Any], chosen: Mapping[str, str], place: str) -> None:
    """Makes the values the option ``values`` in their place, those of each group for its option only."""
    store = ConfigStore.instance()
    limit = known["train"].get("eval_batches")
    if isinstance(limit, int):  # mode=eval covers the whole split, as in conf/model
        known["train"]["eval_batches"] = f"${{by:${{mode}},eval,null,{limit}}}"
    for group, option in chosen.items():
        # A mapping is replaced, not merged with that of the files.
        cleared = {key: None for key, value in known[group].items() if isinstance(value, dict)}
        for part, node in (("cleared", cleared), ("set", known[group])):
            where = f"{OF_CHECKPOINT}/{part}/{group}"
            store.store(group=where, name=option, node={group: node}, package="_global_")
    defaults: list[Any] = [
        {f"optional /{OF_CHECKPOINT}/{part}/{group}@_global_": f"${{{group}}}"}
        for group in chosen
        for part in ("cleared", "set")
    ]
    node = {"defaults": [*defaults, "_self_"], **top, "train": known["train"]}
    store.store(group=f"{OF_CHECKPOINT}/{place}", name=_VALUES, node=node, package="_global_")


def _known(config: Mapping[str, Any], base: Any, typed: Mapping[str, Override]) -> dict[str, dict[str, Any]]:
    """Returns the sections' values, without those that the files derive from others and that come out the same.

    Nor those that are typed: of a mapping, what is typed is then added to what the files say, as it was before.
    """
    files = OmegaConf.to_container(base, resolve=False, enum_to_str=True)
    filled: dict[str, Any] = {**files, **_top(config)}
    derived: list[tuple[str, str]] = []
    for section in TRAINED:
        known = {key: literal(value) for key, value in config[section].items()}
        named = [key for key in known if "${" in json.dumps(files[section].get(key), default=str)]
        derived += [(section, key) for key in named]
        filled[section] = {**files[section], **{key: known[key] for key in known if key not in named}}
    values = OmegaConf.create(filled)
    given = {f"{section}.{key}" for section, key in derived if _resolved(values[section], key) == config[section][key]}
    given |= typed.keys()
    return {
        section: {key: literal(value) for key, value in config[section].items() if f"{section}.{key}" not in given}
        for section in TRAINED
    }


def _resolved(section: Any, key: str) -> Any:
    try:
        value = section[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return OmegaConfBaseException  # equal to nothing in a checkpoint


def checkpoint_of(cfg: Any) -> Path:
    """Returns what ``checkpoint`` names: a checkpoint, or a run directory, whose newest one is meant.

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
    """Checks that a checkpoint holds this model, by names and shapes: no tensor is read.

    Args:
        path: See ``Checkpoint.find``.
        chain: The model.
        cfg: The configuration that it was built from.

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
    """Returns the end of a message: which keys of model and data are not those of the checkpoint."""
    differing = [
        f"{section}.{key}={value} in the checkpoint and {cfg[section].get(key)} in this command"
        for section in ("model", "data")
        for key, value in (config or {}).get(section, {}).items()
        if cfg[section].get(key) != value
    ]
    return f"; {', '.join(differing[:_SHOWN])}" if differing else ""
