"""Checks the run that a rank receives from rank 0: it may only execute, read and write what its command line names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from common.errors import UserError
from conf.composition import compose
from conf.instantiate import add_to_path, nodes_with_target, to_dict, why_foreign
from conf.words import code_folders

# Keys whose values a rank executes, reads or writes. It accepts rank 0's only if its own command line gives the same.
_GUARDED = ("parallel.env", "data", "callbacks", "checkpoint", "model.init_from")
_ANY = "\0"  # placeholder for values that differ by process: the time of its start, in any form, and the run's id ...
_ANY_PATH = r"(?!\.)[\w .,:+-]+(?:/(?!\.)[\w .,:+-]+)*"  # ... in a path, whose parts cannot begin with a dot


def compose_own(
    arguments: Sequence[str], saved: Any = None, replaced: Callable[[Any], Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Return the configuration of this rank's own command line as plain data, and its run directory.

    In both, ``_ANY`` stands for the time and the run's id, which rank 0 determines.

    Args:
        arguments: The command line.
        saved: A checkpoint's configuration (training.checkpoint.configuration.SavedConfig).
        replaced: How a Python program changes the configuration; None: it does not.

    Raises:
        HydraException: It cannot be composed.
    """
    cfg = compose(arguments, with_hydra=True, saved=saved)
    for name in ("began", "now", "run_id"):
        OmegaConf.register_new_resolver(name, lambda *given: _ANY, replace=True)
    run_dir = cfg.hydra.runtime.output_dir = os.path.abspath(cfg.hydra.run.dir)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg.hydra
    cfg = cfg if replaced is None else replaced(cfg)
    tree = json.loads(json.dumps(to_dict(cfg)))  # rank 0's configuration was converted to JSON, too
    return {**tree, "import_from": code_folders(arguments)}, run_dir


def check_received(tree: dict[str, Any], run_dir: str, own: Mapping[str, Any], own_dir: str) -> None:
    """Check rank 0's configuration on another rank, because it has come through a store that others may reach.

    The values by which it could execute, write or read something here must be those of this rank's own command line:
    environment variables, paths, and every section with code that is neither this project's nor torch's.

    Args:
        tree: The configuration, as plain data. Its ``import_from`` is replaced by this rank's.
        run_dir: The run directory.
        own: The configuration of this rank's own command line.
        own_dir: The run directory of that command line.

    Raises:
        UserError: A value differs. The message names the keys, but not the values, which may be secret.
    """
    tree["import_from"] = own["import_from"]
    add_to_path(tree["import_from"])
    foreign = [node for node in nodes_with_target(tree) if why_foreign(node["_target_"]) is not None]
    mine = [node for node in nodes_with_target(own) if isinstance(node["_target_"], str)]
    refused = [f"_target_={node['_target_']}" for node in foreign if not any(_agrees(known, node) for known in mine)]
    refused += [key for key in _GUARDED if not _agrees(_at(own, key), _at(tree, key))]
    if _at(tree, "train.resume") not in ("auto", _at(own, "train.resume")):  # auto: found in the run directory
        refused.append("train.resume")
    if not _agrees(own_dir, run_dir):
        refused.append(f"hydra.run.dir={run_dir}")
    if refused:
        raise UserError(
            f"rank 0 sends {', '.join(sorted(refused))}, which the command line of this rank does not name. Give every "
            "machine the same command line, in the same folder, and the variables that it refers to"
        )


def _agrees(own: Any, sent: Any) -> bool:
    """Return whether rank 0's value equals this rank's. A size that is null here may be a number.

    ``_ANY`` matches a name, or a path that only leads downwards.
    """
    if isinstance(own, dict) and isinstance(sent, dict):
        return own.keys() == sent.keys() and all(_agrees(own[key], sent[key]) for key in own)
    if isinstance(own, list) and isinstance(sent, list):
        return len(own) == len(sent) and all(map(_agrees, own, sent))
    if isinstance(own, str) and isinstance(sent, str) and _ANY in own:
        return re.fullmatch(re.escape(own).replace(_ANY, _ANY_PATH), sent) is not None
    return own == sent or (own is None and isinstance(sent, (int, float)))


def _at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path of plain data; None if there is none."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree or None  # an empty mapping counts as none
