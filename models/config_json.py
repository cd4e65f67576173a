"""What Hugging Face's config.json says of a model: its sizes, and whether this project computes what it describes.

Without torch: configurations ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.files import parse_json

# What transformers writes for any model and no logit depends on.
_FREE = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict", "output_attentions",
    "output_hidden_states", "output_past", "id2label", "label2id", "_num_labels", "problem_type",
    "task_specific_params", "gradient_checkpointing", "transformers.js_config", "_attn_implementation_autoset",
    "unsloth_fixed", "unsloth_version", "tokenizer_class", "prefix", "finetuning_task", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "is_decoder", "sep_token_id", "decoder_start_token_id",
    # How text is generated, which stands in generation_config.json since transformers 4.25.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
_FIXED = {"is_encoder_decoder": [False], "chunk_size_feed_forward": [0], "pruned_heads": [{}]}


@dataclass(frozen=True)
class Family:
    """What each key of config.json means to the models of a family; a key that is in no table is refused.

    Attributes:
        name: The word after ``model=``.
        kinds: {what ``architectures`` names: the sizes that follow from it}.
        sizes: {this project's name of a size: theirs}.
        fixed: {key: the values with which this project computes the same}.
        free: Keys that no logit depends on, or that names and shapes of the weights show.
        unseen: Keys that change numbers, and no name or shape.
        complete: Returns the keys with those that may be missing, and without nested ones.
    """

    name: str
    kinds: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, str]
    fixed: Mapping[str, Sequence[Any]]
    free: frozenset[str]
    unseen: tuple[str, ...]
    complete: Callable[[dict[str, Any]], dict[str, Any]]

    def read(self, path: Path) -> dict[str, Any]:
        """Return the sizes that a config.json describes, by this project's names.

        Raises:
            ModelError: It is of another kind, or has a key that may change numbers and that this model does not know.
        """
        try:
            return self.describe(parse_json(path.read_bytes()), str(path))
        except ModelError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"{path} is none of {', '.join(self.kinds)}: {error!r}") from None

    def describe(self, content: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the sizes that the content of a config.json describes; see ``read``."""
        config = self.complete({key: value for key, value in content.items() if value is not None})
        kind = config["architectures"][0]
        known = kind in self.kinds
        problems = [] if known else [f"describes {kind} (here {' or '.join(self.kinds)})"]
        problems += [f"lacks {theirs}" for theirs in self.sizes.values() if known and theirs not in config]
        fixed, free = {**_FIXED, **self.fixed}, _FREE | self.free | {*self.sizes.values()}
        for key, value in config.items():
            if key in fixed and value not in fixed[key]:
                problems.append(f"has {key}={value} (here {' or '.join(map(str, fixed[key])) or 'none'})")
            elif known and key not in fixed and key not in free:
                problems.append(f"has {key}={value}, which is not known here")
        if problems:
            said = ", ".join(problems)
            raise ModelError(f"{where} {said}; model={self.name} would compute other numbers than {kind}")
        return {**{key: config[theirs] for key, theirs in self.sizes.items()}, **self.kinds[kind]}


def first_difference(sizes: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first (name, value, own value) in which sizes differ from a model's own, which may have more words."""
    for key, value in sizes.items():
        if key in own and own[key] != value and not (key == "vocab_size" and own[key] > value):
            return key, value, own[key]
    return None
