"""The configuration of a causal language model of transformers: reading, checks and export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from common.files import expand_home, folder_of
from common.packages import load_transformers
from models import causal_lm_attention, causal_lm_experts
from models.causal_lm_files import Opened, from_file
from models.huggingface import Family, HuggingFace

if TYPE_CHECKING:
    from torch import Tensor

# Keys of a configuration that do not affect the numbers of a model.
_FREE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "vocab_size"}
_FREE |= {"bos_token_id", "eos_token_id"}  # an export has those of the data's tokens, and null for padding beyond them
_FAMILY = Family("transformers", kinds={}, sizes={}, keys={}, unseen=(), complete=dict)


def config_file(config: str | None) -> Path:
    """Return the path of the config.json that ``model.config`` names. Raises ModelError if there is none."""
    if config is None:
        raise ModelError(
            "model=transformers needs to know which: set model.init_from= a folder with config.json and weights, or "
            "model.config= a config.json to train it from scratch"
        )
    path = expand_home(config)
    path = path if path.suffix == ".json" else folder_of(config) / "config.json"
    if not path.is_file():
        raise ModelError(f"model.config: there is no {path}; give a folder that has one, or the file itself")
    return path


def read_config(config: str | None, vocab_size: int | None, settings: Mapping[str, Any]) -> Any:
    """Return the transformers configuration in a file, with some keys replaced by ``settings``.

    Raises:
        ModelError: If the file describes no causal language model, or a setting does not exist.
    """
    path = config_file(config)
    transformers = load_transformers()
    try:
        content = transformers.PreTrainedConfig.get_config_dict(path)[0]  # accepts infinity, which JSON does not have
        kind = content["model_type"]
        known = transformers.AutoConfig.for_model(kind)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            f"{path} describes no model that transformers {transformers.__version__} has: {error}"
        ) from None
    if "vocab_size" in settings:
        raise ModelError(f"model.settings.vocab_size: type model.vocab_size={settings['vocab_size']}")
    text = known.get_text_config()
    if unknown := [key for key in settings if key not in content and not hasattr(text, key)]:
        raise ModelError(f"model.settings.{unknown[0]}: config.json of a {kind} model has no such key")
    if "num_hidden_layers" in settings:
        content.pop("layer_types", None)  # let the configuration class choose them for this number of layers
    changed = {**content, **settings} | ({} if vocab_size is None else {"vocab_size": vocab_size})
    try:
        made = transformers.AutoConfig.for_model(**changed)
    except Exception as error:  # each configuration class checks its values in its own way
        raise ModelError(f"{path}: transformers does not accept this {kind} configuration: {error}") from None
    if type(made) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or made.is_encoder_decoder:
        raise ModelError(f"{path} describes a {kind} model, which is no causal language model of transformers")
    if made.get_text_config() is not made:
        inner = ", ".join(key for key in made.sub_configs if key != "text_config")
        raise ModelError(f"{path} describes a {kind} model with {inner}; model=transformers trains text only")
    causal_lm_attention.register()
    causal_lm_experts.register()
    made._experts_implementation = causal_lm_experts.NAME
    return made


def sizes_of(model: Mapping[str, Any], words: int | None = None) -> dict[str, Any]:
    """Return the vocabulary size: the file's, or the data's if it is larger and no weights are read."""
    if model["vocab_size"] is not None:
        return {}
    content = json.loads(config_file(model["config"]).read_bytes())
    theirs = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    if theirs is None:
        raise ModelError(f"{config_file(model['config'])} has no vocab_size; set model.vocab_size")
    return {"vocab_size": theirs if model.get("init_from") is not None else max(theirs, words or 0)}


@dataclass(frozen=True)
class Published(HuggingFace):
    """The file format in which transformers stores one of its own models.

    Attributes:
        model: The model, which may be on the meta device.
        settings: {key of config.json: value that replaces the file's value}.
    """

    model: Any = field(kw_only=True)
    settings: Mapping[str, Any] = field(kw_only=True)

    @classmethod
    def of(cls, model: Any, names: Mapping[str, str], words: tuple[str, ...], settings: Mapping[str, Any]) -> Published:
        """Make the format for a model of transformers. ``names`` and ``words`` are as in ``HuggingFace``."""
        config = {**_plain(model.config), "architectures": [type(model).__name__]}
        return cls(_FAMILY, config, names, words, model=model, settings=settings)

    def read(self, opened: Mapping[str, Opened]) -> Mapping[str, Opened]:
        """See ``HuggingFace.read``."""
        return from_file(self.model, opened)

    def export(self, state: Mapping[str, Tensor], words: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See ``HuggingFace.export``."""
        from transformers.core_model_loading import revert_weight_conversion

        tensors, config = super().export(state, words)
        return revert_weight_conversion(self.model, tensors), config

    def difference(self, path: Path) -> str | None:
        """Return a message about the first key in which the model differs from a config.json; None if there is none."""
        theirs, ours = _plain(read_config(str(path), None, self.settings)), self.written
        for key, value in theirs.items():
            free = key in _FREE or (key == "pad_token_id" and value is None)
            if not free and ours.get(key) != value:
                return f"{path} says {key}={value}, the model has {ours.get(key)}; leave model.config out"
        return None


def _plain(config: Any) -> dict[str, Any]:
    """Return all keys of a configuration in the form of config.json."""
    return json.loads(config.to_json_string(use_diff=False))
