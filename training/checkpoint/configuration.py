"""The configuration that a checkpoint keeps: a command that names the checkpoint need not repeat it.

It says what is trained, not where (see ``training.config.kept``). ``with_checkpoint`` makes it an option of the groups,
so that Hydra composes it as it composes a file of conf/: whatever else is typed wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from common.errors import CheckpointError, TrainingError
from conf import OF_CHECKPOINT
from conf.schema import schema_of
from conf.trust import literal
from models.chain import Chain
from training.checkpoint.load import Tensors, newest, read_manifest
from training.checkpoint.manifest import checkpoint_folder

_KEY = "config"  # of the manifest
_GROUPS = ("data", "optim", "scheduler")  # whose options the option of model brings
_SHOWN = 4


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Adds the configuration of the checkpoint that a command line names to the command line.

    Args:
        arguments: What was typed, without the program's name.

    Returns:
        The arguments, with ``model=of_checkpoint`` in the place of the model where ``checkpoint=``, ``train.resume=``
        or, by ``train.resume=auto``, the run directory has a checkpoint that keeps its configuration.

    Raises:
        CheckpointError: There is no whole checkpoint where one is named.
        TrainingError: Another model was typed, or several checkpoints with different configurations.
    """
    try:
        typed = {o.key_or_group: o for o in OverridesParser.create().parse_overrides(_overrides(arguments))}
    except HydraException:
        return list(arguments)  # Hydra says it better
    paths = _checkpoints(typed)
    configs = [read_manifest(Path(path)).get(_KEY) for path in paths]
    if not configs or configs[0] is None:
        return list(arguments)
    if any(config != configs[0] for config in configs):
        raise TrainingError(f"{', '.join(paths)} have different configurations; name one of them at a time")
    model, wanted = configs[0]["model"].get("name"), _values(typed.get("model"))
    if any(word != model for word in wanted):
        raise TrainingError(
            f"{paths[0]} holds model={model}, and model={','.join(wanted)} was typed; leave model= out, or name a "
            "checkpoint of that model"
        )
    _register(configs[0])
    rest = [a for a in arguments if not (wanted and a.partition("=")[0].lstrip("+") == "model")]
    return [f"model={OF_CHECKPOINT}", *rest]


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if "=" in argument and not argument.startswith("-")]


def _checkpoints(typed: Mapping[str, Override]) -> list[str]:
    """Returns the checkpoints that the overrides name."""
    named = _values(typed.get("checkpoint")) or _values(typed.get("train.resume"))
    if named == ["auto"]:
        folders = _values(typed.get("hydra.run.dir"))
        found = [newest(Path(folder) / "checkpoints") for folder in folders]
        return [str(path) for path in found if path is not None]
    return [path for path in named if "${" not in path and path != "auto"]


def _values(override: Override | None) -> list[str]:
    """Returns the text of an override's value, or of each value of a sweep; empty for none, null and other kinds."""
    if override is None:
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    texts = [value.text if isinstance(value, QuotedString) else value for value in values]
    return [text for text in texts if isinstance(text, str)]


def _register(config: Mapping[str, Any]) -> None:
    """Makes the configuration the option ``of_checkpoint`` of the groups."""
    store = ConfigStore.instance()
    config = {name: literal(section) for name, section in config.items()}
    for group in ("model", *_GROUPS):
        schema = schema_of(group, OF_CHECKPOINT, config[group].get("_target_"))
        if schema is not None:
            store.store(group=f"schema/{group}", name=OF_CHECKPOINT, node=schema)
    for group in _GROUPS:
        store.store(group=group, name=OF_CHECKPOINT, node=config[group])
    whole = {name: section for name, section in config.items() if name not in _GROUPS}
    limit = config["train"].get("eval_batches")
    if isinstance(limit, int):  # mode=eval covers the whole split, as in conf/model
        whole["train"] = {**config["train"], "eval_batches": f"${{by:${{mode}},eval,null,{limit}}}"}
    defaults = [*({f"override /{group}": OF_CHECKPOINT} for group in _GROUPS), "_self_"]
    store.store(group="model", name=OF_CHECKPOINT, node={"defaults": defaults, **whole}, package="_global_")


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
        path: See ``training.checkpoint.read_manifest``.
        chain: The model.
        cfg: The configuration that it was built from.

    Raises:
        CheckpointError: It does not. The message names the tensor, and the keys that differ from the checkpoint's.
    """
    from safetensors import SafetensorError

    manifest = read_manifest(path)
    try:
        stored = Tensors(checkpoint_folder(path), manifest)
        shapes = {name: tuple(stored[name].shape) for name in stored if "/" not in name}
    except (OSError, SafetensorError):
        return  # damaged: loading compares the checksums and names the file
    for name, tensor in chain.skeleton().state_dict().items():
        shape, expected = shapes.get(chain.canonical(name)), tuple(tensor.shape)
        if shape != expected:
            problem = "is not in it" if shape is None else f"has {shape}, expected {expected}"
            reasons = _differences(manifest.get(_KEY), cfg)
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
