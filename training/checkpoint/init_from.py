"""``model.init_from``: starts training from weights that this project exported or that Hugging Face publishes.

The weights are a folder with model.safetensors (or its parts, which model.safetensors.index.json lists), or one such
file. Each rank reads only the tensors of its layers, and only its box of sharded ones. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Set
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import TrainingError
from common.files import download_hint, find_weights, folder_of
from conf import EVALUATES
from conf.instantiate import with_values
from conf.schema import Root
from data.vocabulary import GPT2_VOCAB_SIZE, gpt2, parse_extra_tokens, tokens_after_gpt2
from models.chain import Chain, source_of
from models.sequential import prefix_of
from parallel.pieces import Box, Boxes, fill
from parallel.strategy import Strategy
from training.checkpoint.files import sha256
from training.checkpoint.load import AUTO, StoredTensor, differences

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 3
_PADDED_TO = 128  # padded vocabulary sizes are multiples of this
_SAMPLED, _SAMPLES = 4096, 64  # a digest reads this many bytes per block, and this many blocks of a file
_DIGITS = 12
_BLOCK = 4096  # rows summed at a time: a float64 copy of a whole embedding would be twice its size


def start(model: Any, chain: Chain, strategy: Strategy) -> None:
    """Load the weights that a new run starts from, for ``model.init_from``, ``model.extra_tokens`` or both.

    These weights may be the base of adapters. No checkpoint contains the base.

    Raises:
        TrainingError: The weights do not fit; see ``check_start``.
    """
    known = 0
    if model.init_from is not None:
        weights = check_start(model, chain)
        try:
            strategy.load_state_dict(weights, weights.expected.__contains__)
        except ValueError as error:
            raise TrainingError(f"model.init_from={model.init_from} does not fit: {error}") from error
        known = len(weights.added)
    if model.get("extra_tokens") is not None:
        _add_tokens(model.extra_tokens, chain, strategy, known)


def with_base(cfg: Root, chain: Chain) -> Any:
    """Return the configuration with ``model.lora.base``, which identifies the weights under the run's adapters.

    Raises:
        TrainingError: The adapters of a checkpoint were trained on other weights.
    """
    if not chain.unsaved:
        return cfg
    model, lora = cfg.model, cfg.model.lora
    if model.init_from is not None:
        base = "sha256=" + "+".join(map(sha256, _files(find_weights(model.init_from))))
    else:
        base = f"weights={chain.fingerprint}" if chain.fingerprint else f"seed={cfg.seed}"
    if lora.base not in (None, base):
        raise TrainingError(
            f"this checkpoint was trained on the base {lora.base}, but model.init_from={model.init_from} "
            f"seed={cfg.seed} gives {base}; set model.init_from and seed to the values that they were trained with"
        )
    return with_values(cfg, {"model.lora.base": base})


def digest_read(cfg: Root, chain: Chain) -> str | None:
    """Return a digest of the files that ``model.init_from`` names; None if no file is read, or one is missing.

    The digest covers the name and size of each file and blocks spread over it. It does not cover the whole file, since
    a rank reads only its layers, and reading the whole of a large model on every rank may take minutes.
    """
    model = cfg.model
    if model.init_from is None or (
        not chain.unsaved and (cfg.mode in EVALUATES or cfg.train.resume not in (None, AUTO))
    ):
        return None
    digest = hashlib.sha256()
    try:
        files = _files(find_weights(model.init_from))
        beside = [files[0].with_name(name) for name in ("config.json", "tokenizer.json")]
        for path in [*files, *filter(Path.exists, beside)]:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\0".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_SAMPLED, size // _SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLED))
    except (OSError, TrainingError):  # a missing file that is needed is an error where it is read
        return None
    return digest.hexdigest()[:_DIGITS]


def check_start(model: Any, chain: Chain) -> Weights:
    """Return the weights of ``model.init_from``, after checking config.json and the tensors' names and shapes.

    Raises:
        TrainingError: A size differs, or tensors are missing, have another shape, or do not belong to the model. The
            message names them.
        ModelError: config.json describes a model that this project does not have.
    """
    weights = Weights(model, chain)
    path = folder_of(model.init_from) / "config.json"
    if chain.hugging_face is not None and path.is_file():
        if (differs := chain.hugging_face.difference(path)) is not None:
            raise TrainingError(f"model.init_from: {differs}")
    shapes = {name: tuple(weights[name].shape) for name in weights} | dict.fromkeys(weights.unexpected, ())
    wanted = {name: tuple(tensor.shape) for name, tensor in weights.expected.items()}
    if problems := differences(shapes, wanted, "is missing", "the model"):
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        said = f"{'; '.join(problems[:_SHOWN])}{more}. Give the model the layers and sizes that the weights have"
        raise TrainingError(f"model.init_from={model.init_from} does not fit model={model.name}: {said}")
    return weights


def check_new_words(model: Any, chain: Chain, weights: Weights, words: int | None) -> None:
    """Check that the weights include all ``words`` of the data if only adapters train. Raises TrainingError."""
    if words is None or chain.embedding not in chain.unsaved:
        return
    known = weights.stored(chain.embedding).shape[0]
    if known < words:
        raise TrainingError(
            f"model.lora.rank={model.lora.rank}: the rows of {words - known} new tokens would not be trained, because "
            f"the data has {words} tokens and model.init_from={model.init_from} {known}; leave model.lora.rank out"
        )


def unseen(model: Any, chain: Chain) -> str | None:
    """Return a warning if there is no config.json with the settings that weights do not show; otherwise None."""
    folder, form = folder_of(model.init_from), chain.hugging_face
    if form is None or (folder / "config.json").is_file():
        return None
    said = ", ".join(f"{key}={form.config[key]}" for key in form.family.unseen)
    return (
        f"{folder} has no config.json, and its weights fit other models too: nothing shows that they were trained with "
        f"{said}; put the model's config.json there to have it compared"
    )


def not_drawn(read: Set[str], chain: Chain) -> Chain:
    """Return a chain that does not draw the initial numbers of the tensors that will be read from a file."""
    drawn = chain.initialise
    if drawn is None:  # the layers' constructors draw
        return chain
    # A reference is drawn under the name of its layer.
    read = read - {source_of(name) for name in chain.unsaved if name not in read}

    def initialise(name: str, module: nn.Module) -> None:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not all(f"{name}.{key}" in read for key, _ in own):
            drawn(name, module)

    return replace(chain, initialise=initialise)


class Weights(dict):
    """The tensors of ``model.init_from``, under this project's names. Boxes of them are read on demand.

    Attributes:
        expected: The model's tensors by name, without memory; a tied tensor appears once.
        unexpected: The names of tensors in the file that the model does not have.
        added: The tokens after GPT-2's vocabulary that have rows in the file.
    """

    def __init__(self, model: Any, chain: Chain) -> None:
        """Read the names of the tensors.

        Raises:
            TrainingError: The file does not exist, or it holds another model.
        """
        files, self._names = _files(find_weights(model.init_from)), (model.init_from, model.name)
        stored = {name: partial(StoredTensor, file, name) for file in map(_open, files) for name in file.keys()}
        self._format = form = chain.hugging_face
        self._prefix = prefix_of(chain.names)
        self._opened = stored if form is None else form.read(stored)
        self.added: tuple[str, ...] = ()
        if form is not None and "extra_tokens" in model and (theirs := tokens_after_gpt2(files[0].parent)):
            self.added = theirs
            _check_begins_with(theirs, model)
        self._words = chain.limits.get("vocabulary")
        base, state = (chain.base or chain).skeleton().state_dict(), chain.skeleton().state_dict()
        self.expected = {n: t for n, t in state.items() if n not in chain.tied and source_of(n) in base}
        super().__init__({name: key for name in self.expected if (key := self._key(name)) in self._opened})
        used = {*self.values(), *map(self._key, chain.tied)}
        copies = {self._key(copy): self._key(name) for copy, name in chain.tied.items()}
        self._copies = {copy: own for copy, own in copies.items() if copy in self._opened and copy != own}
        known = {} if form is None else form.redundant
        others = [name for name in self._opened if name not in used]
        self._redundant = {n: follows for n in others for end, follows in known.items() if n.endswith(end)}
        self.unexpected = [name for name in others if name not in self._redundant]

    def __getitem__(self, name: str) -> Boxes:
        stored = self.stored(name)
        if self._format is not None and name.endswith(self._format.transposed):
            return _Transposed(stored)
        rows, *width = self.expected[name].shape or (0,)
        known, *stored_width = stored.shape or (0,)
        of_words = rows == self._words if self._format is None else source_of(name) in self._format.words
        grows = of_words and known < rows and width == stored_width
        return _Padded(stored, rows) if grows else stored

    def stored(self, name: str) -> Boxes:
        """Return a parameter's tensor as the file stores it."""
        return self._opened[super().__getitem__(name)]()

    def check_copies(self) -> None:
        """Check the tensors that are not loaded because other tensors determine them: tied and redundant ones.

        Raises:
            TrainingError: A tensor contradicts the others, so the weights belong to another model.
        """
        problems = [
            f"{copy} differs from {own}, the model has one tensor for both"
            for copy, own in self._copies.items()
            if not _equal(self._opened[copy](), self._opened[own]())
        ]
        for key, follows in self._redundant.items():
            if not follows(self._opened[key]()[...]):
                problems.append(f"{key} holds other numbers than the model computes")
        if problems:
            said, (file, model) = "; ".join(problems[:_SHOWN]), self._names
            raise TrainingError(f"model.init_from={file} is not what model={model} computes: {said}")

    def _key(self, name: str) -> str:
        if self._format is None:
            name = source_of(name)
            return name if name in self._opened else name.removeprefix(self._prefix)
        theirs = self._format.their_name(source_of(name))
        return theirs if theirs in self._opened else theirs.removeprefix(self._format.optional)


def _equal(one: Boxes, other: Boxes) -> bool:
    count = one.shape[0]
    blocks = (slice(i, min(i + _BLOCK, count)) for i in range(0, count, _BLOCK))
    return one.shape == other.shape and all(bool((one[block] == other[block]).all()) for block in blocks)


class _Transposed:
    """A matrix that its file stores transposed."""

    def __init__(self, stored: Boxes) -> None:
        self._stored, self.shape = stored, torch.Size(reversed(stored.shape))

    def __getitem__(self, box: Box) -> Tensor:
        return self._stored[box[::-1] if isinstance(box, tuple) else ...].t().contiguous()


class _Padded:
    """A stored tensor with one row per word, extended by rows that equal the mean row.

    A row of zeros would give the logit 0, which is higher than the logits of most words.
    """

    def __init__(self, stored: Boxes, rows: int) -> None:
        self._stored, self.shape = stored, torch.Size([rows, *stored.shape[1:]])

    def __getitem__(self, box: Box) -> Tensor:
        rows, *others = box if isinstance(box, tuple) else [slice(None)] * len(self.shape)
        start, stop, _ = rows.indices(self.shape[0])
        known = self._stored.shape[0]
        own = self._stored[(slice(min(start, known), min(stop, known)), *others)]
        if stop <= known:
            return own
        mean = _mean(self._stored)[tuple(others)].to(own.dtype)
        return torch.cat([own, mean.expand(stop - start - len(own), *mean.shape)])


def _files(path: Path) -> list[Path]:
    given = f"model.init_from={path}"
    for entry in [path, *(path.iterdir() if path.is_dir() else ())]:
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise TrainingError(f"{given}: {entry} is a device, a pipe or a socket, which might never end; give a file")
    if path.is_dir():
        if (path / "manifest.json").exists():
            word = shlex.quote(f"checkpoint={path}")
            raise TrainingError(f"{given} is a checkpoint: export it (mode=export {word} …), or use train.resume=")
        whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
        if not whole.exists() and index.exists():
            return _parts(index)
        if files := [whole] if whole.exists() else sorted(path.glob("model-*.safetensors")):
            return files
        pickled = sorted(p for p in path.iterdir() if p.suffix in _PICKLES)
        if not pickled:
            raise TrainingError(f"{given} holds no model.safetensors; give a folder that does, or a .safetensors file")
        path = pickled[0]
    if not path.exists():
        ways = f"give a folder with model.safetensors, or a .safetensors file{download_hint(path)}"
        raise TrainingError(f"{given} does not exist; {ways}")
    if path.suffix in _PICKLES:
        raise TrainingError(
            f"{path} is a pickle, which can run any code when it is opened, and is not read. If you trust it, convert "
            f"it once: python -c 'import sys, torch; from safetensors.torch import save_file; save_file({{k: v.clone() "
            f"for k, v in torch.load(sys.argv[1], weights_only=True).items()}}, sys.argv[2])' "
            f"{shlex.quote(str(path))} {shlex.quote(str(path.with_name('model.safetensors')))}"
        )
    return [path]


def _parts(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [index.parent / Path(name).name for name in names]  # in the index's folder, even if a name has a path
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TrainingError(f"model.init_from: {index} cannot be read: {error!r}") from None


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"model.init_from: {path} cannot be read as safetensors: {error}") from error


def _check_begins_with(theirs: tuple[str, ...], model: Any) -> None:
    """Check that ``model.extra_tokens`` begins with the extra tokens of the file's vocabulary."""
    ours = parse_extra_tokens(model.get("extra_tokens"))
    if list(theirs) != list(ours)[: len(theirs)]:
        wanted = json.dumps({**dict.fromkeys(theirs), **{k: v for k, v in ours.items() if k not in theirs}})
        raise TrainingError(
            f"model.init_from={model.init_from} has the tokens {', '.join(theirs)} after GPT-2's vocabulary, but "
            f"model.extra_tokens does not begin with them: {', '.join(ours) or 'empty'}. Their order determines their "
            f"ids; set {shlex.quote(f'model.extra_tokens={wanted}')}"
        )


# -- new tokens ------------------------------------------------------------------------------------------------------


def vocabulary_with(vocab_size: int, extra_tokens: Any) -> int:
    """Return the size of the model's vocabulary with ``model.extra_tokens``, whose ids begin at 50,257.

    The extra tokens replace padding if there is any. A size that is a multiple of 128 grows to a multiple of 128.

    Raises:
        TrainingError: The model's vocabulary is smaller than GPT-2's.
    """
    extra = parse_extra_tokens(extra_tokens)
    if not extra:
        return vocab_size
    if vocab_size < GPT2_VOCAB_SIZE:
        raise TrainingError(
            f"model.extra_tokens follow GPT-2's {GPT2_VOCAB_SIZE} tokens, but model.vocab_size={vocab_size} is less; "
            f"set model.vocab_size={GPT2_VOCAB_SIZE} or more"
        )
    wanted = GPT2_VOCAB_SIZE + len(extra)
    step = _PADDED_TO if vocab_size % _PADDED_TO == 0 else 1
    return max(vocab_size, -(-wanted // step) * step)


@torch.no_grad()
def _add_tokens(extra_tokens: Any, chain: Chain, strategy: Strategy, known: int) -> None:
    """Set the rows of new tokens in every copy of the embedding that this rank holds.

    The first ``known`` tokens have their rows already. Each other row is the mean of the rows of its description's
    tokens, or of all of GPT-2's if it has no description.
    """
    extra = parse_extra_tokens(extra_tokens)
    if len(extra) == known:
        return
    for name, parameter in strategy.named_parameters():
        if source_of(name) == chain.embedding:
            rows = strategy.whole(name, parameter.detach())
            everything = _mean(rows[:GPT2_VOCAB_SIZE])
            for number, words in list(enumerate(extra.values()))[known:]:
                mean = everything if words is None else _mean(rows[gpt2().encode_ordinary(words)])
                rows[GPT2_VOCAB_SIZE + number] = mean.to(rows)
            fill(strategy.piece(name, parameter), rows, name)


def _mean(rows: Boxes) -> Tensor:
    """Return the mean row, computed in float64 on the CPU so that copies on all ranks and devices are equal."""
    count = rows.shape[0]
    sums = (rows[i : i + _BLOCK].cpu().double().sum(dim=0) for i in range(0, count, _BLOCK))
    return reduce(torch.add, sums) / count
