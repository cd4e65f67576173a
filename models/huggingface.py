"""Hugging Face's files: the sizes in a config.json, and the conversion of names and shapes of weights, both ways.

Reading and writing use the same table of differences (``HuggingFace``): prefixes of names, and matrices that Hugging
Face stores transposed. This module does not import torch, because configurations use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from common.files import folder_of

if TYPE_CHECKING:
    from torch import Tensor

# Keys that transformers writes for any model. No logit depends on them.
_FREE = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache bos_token_id eos_token_id
    pad_token_id initializer_range return_dict output_attentions output_hidden_states output_past id2label label2id
    _num_labels problem_type task_specific_params gradient_checkpointing transformers.js_config
    _attn_implementation_autoset unsloth_fixed unsloth_version tokenizer_class prefix finetuning_task torchscript
    use_bfloat16 tf_legacy_loss is_decoder sep_token_id decoder_start_token_id
""".split()
# Settings of text generation, which are in generation_config.json since transformers 4.25.
_FREE += """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
""".split()
# The word after ``model=`` for each architecture that belongs to a family. Other architectures need
# ``model=transformers``.
WORDS = {
    "GPT2LMHeadModel": "gpt2",
    **dict.fromkeys(("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), "llama"),
}


@dataclass(frozen=True)
class Family:
    """The meaning of the keys of config.json for the models of a family.

    A key that is in no table is refused, unless its value is false, 0 or empty.

    Attributes:
        name: The word after ``model=``.
        kinds: {a name in ``architectures``: the sizes that follow from it}.
        sizes: {this project's name of a size: Hugging Face's name}.
        keys: {key: values with which this project computes the same logits}. None allows any value, because no logit
            depends on the key, or because the names and shapes of the weights show it.
        unseen: Keys that change logits, but not the names and shapes of the weights.
        complete: A function that returns the keys with defaults for missing keys, and without nesting.
    """

    name: str
    kinds: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, str]
    keys: Mapping[str, Sequence[Any] | None]
    unseen: tuple[str, ...]
    complete: Callable[[dict[str, Any]], dict[str, Any]]

    def read(self, path: Path) -> dict[str, Any]:
        """Return the sizes that a config.json describes, under this project's names.

        Raises:
            ModelError: If the file describes another kind of model, or has an unknown key, which may change numbers.
        """
        try:
            return self.describe(json.loads(path.read_bytes()), str(path))
        except ModelError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"{path} describes none of {', '.join(self.kinds)}: {error!r}") from None

    def describe(self, content: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the sizes that the content of a config.json describes. See ``read``."""
        kinds = content.get("architectures")
        if not isinstance(kinds, list) or not kinds:
            raise ModelError(
                f'{where} names no architecture; write "architectures": ["{next(iter(self.kinds))}"] into it if '
                f"model={self.name} is right, or use model=transformers"
            )
        if (kind := str(kinds[0])) not in self.kinds:
            raise ModelError(f"{where} is {kind}; use model={WORDS.get(kind, 'transformers')}")
        config = self.complete({key: value for key, value in content.items() if value is not None})
        problems = [f"lacks {theirs}" for theirs in self.sizes.values() if theirs not in config]
        for key, value in config.items():
            if value and key not in (*_FREE, *self.sizes.values(), *self.keys):
                problems.append(f"has {key}={value}, which is not known here")
            elif (same := self.keys.get(key)) is not None and value not in same:
                problems.append(f"has {key}={value} (here {' or '.join(map(str, same)) or 'none'})")
        if problems:
            listed = ", ".join(problems)
            raise ModelError(
                f"{where} {listed}; model={self.name} would compute other numbers than {kind}. Use model=transformers"
            )
        return {**{key: config[theirs] for key, theirs in self.sizes.items()}, **self.kinds[kind]}

    def beside(self, model: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the sizes in the config.json beside the weights ``model.init_from``.

        If ``model.size`` is set, only the vocabulary is returned; ``HuggingFace.difference`` compares the other sizes.
        If all sizes are typed, or there is no config.json, the result is None.
        """
        extras = next(iter(self.kinds.values()))
        typed = all(model.get(key) is not None for key in (*self.sizes, *extras) if key != "rope_scaling")
        path = Path() if model.get("init_from") is None else folder_of(model["init_from"]) / "config.json"
        if typed or not path.is_file():
            return None
        sizes = self.read(path)
        return sizes if model["size"] is None else {"vocab_size": sizes["vocab_size"]}


@dataclass(frozen=True)
class HuggingFace:
    """The file format in which transformers stores the models of a family.

    Attributes:
        family: The meaning of the keys of config.json.
        config: The content of config.json that follows from the sizes.
        names: {prefix of a name in this project: prefix in Hugging Face's files}. The first matching prefix is used.
        words: The parameters in which each row is a word.
        transposed: The suffixes of the names of matrices that Hugging Face stores transposed.
        redundant: {suffix of a tensor's name: check}, for tensors that follow from the sizes, such as a causal mask.
        optional: A prefix of names that may be missing in published files.
    """

    family: Family
    config: Mapping[str, Any]
    names: Mapping[str, str]
    words: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    redundant: Mapping[str, Callable[[Tensor], bool]] = field(default_factory=dict)
    optional: str = ""

    def their_name(self, name: str) -> str:
        """Return Hugging Face's name for the parameter ``name``."""
        begins, theirs = next(pair for pair in self.names.items() if name.startswith(pair[0]))
        return theirs + name.removeprefix(begins)

    def read(self, opened: Mapping[str, Callable[[], Any]]) -> Mapping[str, Callable[[], Any]]:
        """Return {name in the model: opener of a tensor} from {name in the files: opener of a tensor}."""
        return opened

    def difference(self, path: Path) -> str | None:
        """Return a message about the first size in which the model differs from a config.json; None if all are equal.

        Raises:
            ModelError: If config.json describes a model that this family does not have.
        """
        sizes = self.family.describe(self.config, f"model={self.family.name}")
        for key, value in self.family.read(path).items():
            if sizes[key] != value and not (key == "vocab_size" and sizes[key] > value):
                says = f"{path} says {self.family.sizes.get(key, key)}={value}"
                return f"{says}, the model has {sizes[key]}; leave model.size and model.{key} out"
        return None

    @property
    def written(self) -> dict[str, Any]:
        """The keys of an exported config.json that do not depend on the weights."""
        # transformers 5 reads rope_parameters, other programs (mlx-lm) the keys of older versions.
        rope = self.config.get("rope_parameters") or {}
        older = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}  # else different ones by layer
        older |= {"rope_scaling": rope} if older and rope.get("rope_type", "default") != "default" else {}
        return {**older, **self.config}

    def export(self, state: Mapping[str, Tensor], words: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return Hugging Face's state dict, without a tied head, and the content of config.json.

        Rows from ``words`` on are padding of the vocabulary and are left out. None keeps all rows.
        """
        tensors = {}
        for name, tensor in state.items():
            kept = tensor[:words] if name in self.words else tensor
            tensors[self.their_name(name)] = kept.t().contiguous() if name.endswith(self.transposed) else kept
        embedding = tensors[self.their_name(self.words[0])]
        dtype = str(embedding.dtype).removeprefix("torch.")
        return tensors, {**self.written, "vocab_size": len(embedding), "dtype": dtype}
