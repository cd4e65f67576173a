"""``model.init_from``: weights to start from, exported by this project or Hugging Face's own.

A folder with model.safetensors (or its parts, model-00001-of-00002.safetensors …), or one such file. Each rank reads
the tensors of its own layers only. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import TrainingError
from data.huggingface_tokenizer import added_tokens
from data.vocabulary import parse_extra_tokens
from models.chain import Chain
from models.huggingface import PREFIX, pad
from parallel.strategy import Strategy
from training.checkpoint.new_tokens import add_tokens

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 3


def start(model: Any, chain: Chain, strategy: Strategy) -> None:
    """Give the model the weights that its run begins with, where these are not the drawn ones.

    model   the configuration's section
    raises  TrainingError as ``check_start`` does
    """
    known = 0
    if model.init_from is not None:
        check_start(model, chain)
        weights = Weights(model, chain)
        strategy.load_state_dict(weights)
        known = len(weights.added)
    add_tokens(model.get("extra_tokens"), chain, strategy, known)


def check_start(model: Any, chain: Chain) -> None:
    """Whether ``model.init_from``, where it is set, holds this model: by names and shapes, no tensor is read.

    Raises TrainingError that names what is missing, of another size, or not the model's.
    """
    if model.init_from is None:
        return
    weights = Weights(model, chain)
    problems = []
    for name, tensor in weights.expected.items():
        if name not in weights:
            problems.append(f"{name} is missing")
        elif (found := weights.shape(name)) != (wanted := tuple(tensor.shape)):
            problems.append(f"{name} has {found}, the model {wanted}")
    problems += [f"{name} is not the model's" for name in weights.strangers()]
    if problems:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TrainingError(
            f"model.init_from={model.init_from} does not fit model={model.name}: {'; '.join(problems[:_SHOWN])}{more}. "
            "Give the model the sizes that the weights have"
        )


class Weights(Mapping[str, Tensor]):
    """The file's tensors under this project's names, each read when it is asked for.

    expected  the model's own tensors by name, without memory; tied ones once
    added     the tokens behind GPT-2's own whose rows the file has
    """

    def __init__(self, model: Any, chain: Chain) -> None:
        """Raises TrainingError where there is no such file, or one of another model."""
        self._path = Path(model.init_from).expanduser()
        files = _files(self._path)
        self._file_of = {name: path for path in files for name in _open(path).keys()}
        self._format, self._embedding = chain.hugging_face, chain.embedding
        self.added: tuple[str, ...] = ()
        if self._format is not None:
            _check_config(model, self._format.config, files[0].parent)
            self.added = _known_tokens(model, files[0].parent)
        skeleton = chain.skeleton().state_dict()
        self.expected = {name: tensor for name, tensor in skeleton.items() if name not in chain.tied}
        self._keys = {name: key for name in self.expected if (key := self._key(name)) in self._file_of}

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        tensor = _open(self._file_of[key]).get_tensor(key)
        if self._format is None:
            return tensor
        tensor = self._format.convert(name, tensor)
        return pad(tensor, len(self.expected[name])) if name == self._embedding else tensor

    def __contains__(self, name: object) -> bool:
        return name in self._keys  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of ``self[name]``, out of the file's header."""
        key = self._keys[name]
        tensor = torch.empty(_open(self._file_of[key]).get_slice(key).get_shape(), device="meta")
        shape = tuple(tensor.shape if self._format is None else self._format.convert(name, tensor).shape)
        wanted = tuple(self.expected[name].shape)
        may_grow = self._format is not None and name == self._embedding
        return wanted if may_grow and shape[1:] == wanted[1:] and shape[0] < wanted[0] else shape

    def strangers(self) -> list[str]:
        """Names in the file that the model has no use for."""
        used = set(self._keys.values())
        redundant = self._format.is_redundant if self._format is not None else lambda name: False
        return [name for name in self._file_of if name not in used and not redundant(name)]

    def _key(self, name: str) -> str:
        if self._format is None:
            return name
        theirs = self._format.their_name(name)
        return theirs if theirs in self._file_of else theirs.removeprefix(PREFIX)


def _files(path: Path) -> list[Path]:
    given = f"model.init_from={path}"
    if path.is_dir():
        if (path / "manifest.json").exists():
            raise TrainingError(
                f"{given} is a checkpoint: export it first (python train.py mode=export checkpoint={path} …), or go on "
                "with its run by train.resume="
            )
        whole = path / "model.safetensors"
        found = [whole] if whole.exists() else sorted(path.glob("model-*.safetensors"))
        if found:
            return found
        pickled = sorted(p for p in path.iterdir() if p.suffix in _PICKLES)
        if not pickled:
            raise TrainingError(f"{given} holds no model.safetensors; give a folder that does, or a .safetensors file")
        path = pickled[0]
    if not path.exists():
        raise TrainingError(f"{given} does not exist; give a folder with model.safetensors, or a .safetensors file")
    if path.suffix in _PICKLES:
        raise TrainingError(
            f"{path} is a pickle, which can run any code when it is opened, and is not read. If you trust it, convert "
            f'it once: python -c "import torch; from safetensors.torch import save_file; '
            f"save_file({{k: v.clone() for k, v in torch.load('{path}', weights_only=True).items()}}, "
            f"'{path.with_name('model.safetensors')}')\""
        )
    return [path]


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"model.init_from: {path} cannot be read as safetensors: {error}") from error


def _check_config(model: Any, wanted: Mapping[str, Any], folder: Path) -> None:
    """What config.json says that shapes do not: the number of heads, and the kind of model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads, kind = config.get("n_head"), config.get("model_type", wanted["model_type"])
    except (OSError, ValueError, AttributeError):
        return
    if kind != wanted["model_type"]:
        raise TrainingError(f"model.init_from={model.init_from} is a model of type {kind}, not {wanted['model_type']}")
    if heads is not None and heads != wanted["n_head"]:
        raise TrainingError(
            f"model.init_from={model.init_from} has {heads} heads, the model {wanted['n_head']}; "
            f"set model.n_head={heads}"
        )


def _known_tokens(model: Any, folder: Path) -> tuple[str, ...]:
    """The extra tokens that the file's vocabulary has already; the run's must begin with them."""
    theirs, ours = added_tokens(folder), parse_extra_tokens(model.get("extra_tokens"))
    if list(theirs) != list(ours)[: len(theirs)]:
        wanted = json.dumps({**dict.fromkeys(theirs), **{k: v for k, v in ours.items() if k not in theirs}})
        raise TrainingError(
            f"model.init_from={model.init_from} has the tokens {', '.join(theirs)} behind GPT-2's own, and "
            f"model.extra_tokens begins otherwise: {', '.join(ours) or 'empty'}. Their order is their numbers: "
            f"set 'model.extra_tokens={wanted}'"
        )
    return tuple(theirs)
