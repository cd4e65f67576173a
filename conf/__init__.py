"""The configuration: Hydra's groups as YAML files, and the schemas that they are checked against.

An option of a group is a file ``conf/GROUP/OPTION.yaml``. All code that lists, tests or measures options calls
``options``, so that a new option only needs a new file.
"""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
# The sections that determine what is trained. A checkpoint keeps these and the seed; other sections determine where.
TRAINED = ("model", "data", "optim", "scheduler", "train")
# The groups that determine what is trained, and the groups that change values of other groups.
CHOSEN, ON_TOP = ("model", "data", "optim", "scheduler"), ("experiment", "debug")
# Keys that the program reads itself and does not pass to the section's target (see conf/train.yaml).
OWN_KEYS = {
    "data": {"seq_len", "tokenizer", "packing"},  # of a mixture, for its parts
    "model": {"name", "init_from", "loss", "vocabulary", "extra_tokens", "tokenizer", "lora", "dpo"},
    "optim": {"decay_vectors", "rates", "decays", "update", "others"},
}
# The keys of model.lora, besides base.
LORA = ("rank", "alpha", "dropout", "targets", "dora", "modules_to_save")
DPO = ("beta", "label_smoothing")  # the keys of model.dpo
MIXTURE = "data.mixture.Mixture"  # its parts have the keys of options of ``data=``
# What a command does: ``mode=NAME`` is training/command/modes/NAME.py.
MODES = ("train", "eval", "predict", "plan", "export", "sample", "verify", "compare")
EVALUATES = ("eval", "predict")  # the modes in which a run computes with a checkpoint and trains nothing
# The key of a plain configuration for its options and typed words (see conf.composition.Composed.plain).
COMMAND = "command"


def options(group: str) -> list[str]:
    """Return the names of a group's options, such as ``["classifier", "convnet", ...]`` for ``"model"``, sorted."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def keys_of(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option's file with their values. Keys of options that it extends are left out."""
    return yaml.safe_load((FOLDER / group / f"{option}.yaml").read_text()) or {}
