"""Predictions for a split: the outputs of the last layer as arrays, or lines of JSON; one row per sample, in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib import format as npy
from torch import Tensor

from conf.schema import Root
from data.dataset import Batch, InMemory, Source
from data.jsonl import TokenRows, encoded_rows
from models.chain import Tensors, as_tuple
from models.losses import IGNORED
from parallel.examination import examine
from parallel.outputs import Taker
from training.run.evaluate import evaluate
from training.run.restore import Restored, continued, restore


class Predictions(Taker):
    """The taker of the outputs of a split, which writes them to files.

    Attributes:
        files: The files by their paths, which they have when they are complete.
    """

    alone = True

    def __init__(self, folder: Path, split: str, source: Source, texts: bool, targets: bool) -> None:
        """Prepare files SPLIT.jsonl, or SPLIT.npy and others.

        Args:
            folder: The folder of the files.
            split: The name of the split.
            source: Its samples. Their ids, if they have any, are written too.
            texts: Whether samples are texts. Then the losses of each text's tokens are summed.
            targets: Whether targets are written, too.
        """
        self._folder, self._split, self._source, self._texts, self._targets = folder, split, source, texts, targets
        self.files: dict[Path, BinaryIO] = {}
        self._row = 0

    def select(self, outputs: tuple[Tensor, ...], targets: Any) -> tuple[Tensor, ...]:
        """See ``Taker``. Of texts, return the loss of each token, which is small beside the logits."""
        if not self._texts:
            return outputs
        logits = outputs[0].to(torch.promote_types(outputs[0].dtype, torch.float32)).flatten(0, 1)
        return (F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(targets),)

    def take(self, selected: tuple[Tensor, ...], targets: Any) -> None:
        """See ``Taker``."""
        columns = _named("output", selected)
        if self._texts:
            columns = {"loss": selected[0].double().sum(1), "tokens": (targets != IGNORED).sum(1)}
        self.put(columns | _named("targets", targets) if self._targets else columns, len(as_tuple(targets)[0]))

    def put(self, columns: dict[str, Any], count: int) -> None:
        """Write the next ``count`` samples, a tensor or a list by the name of each array or field."""
        if self._texts:
            ids = self._source.ids(np.arange(self._row, self._row + count))
            self._row += count
            columns = columns if ids is None else {"id": ids, **columns}
            lists = [one.tolist() if isinstance(one, Tensor) else one for one in columns.values()]
            rows = (dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True))
            lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            self._file(".jsonl").write(lines.encode())
            return
        for key, one in columns.items():
            array, name = one.numpy(), f"_{key}.npy".replace("_output", "")
            file = self._file(name)
            if not file.tell():
                shape = (len(self._source) * len(array) // count, *array.shape[1:])
                header = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
                npy.write_array_header_2_0(file, header)
            file.write(array.tobytes())

    def _file(self, ending: str) -> BinaryIO:
        path = self._folder / f"{self._split}{ending}"
        if path not in self.files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.files[path] = open(f"{path}.part", "wb")
        return self.files[path]

    def finish(self) -> None:
        """Complete the files."""
        if self.files and not self._texts and (ids := self._source.ids(np.arange(len(self._source)))) is not None:
            np.save(self._file("_ids.npy"), np.array(ids))
        for path, file in self.files.items():
            file.close()
            Path(file.name).replace(path)

    def __str__(self) -> str:
        names = ",".join(sorted(path.name for path in self.files))
        named = f"{{{names}}}" if len(self.files) > 1 else names
        return f"predictions for the {len(self._source):,} samples of {self._split}: {self._folder}/{named}"


def _named(name: str, tensors: Tensors) -> dict[str, Tensor]:
    several = as_tuple(tensors)
    return {name if len(several) == 1 else f"{name}_{i}": one for i, one in enumerate(several)}


def predict(cfg: Root, restored: Restored, inputs: Any, run_dir: Path) -> Predictions:
    """Predict for arrays, or for each sample of the split of this name, and write files. All ranks call this together.

    Of rows with answers, these are generated, by a strategy of one process.
    """
    split, source, texts = "given", _source(restored, inputs), False
    if isinstance(inputs, str):
        split = inputs
        shapes = [of.shape for of in source.read(np.zeros(1, np.int64), 0)[:2] if isinstance(of, Tensor)]
        texts = restored.data.seq_len is not None and len(shapes) == 2 and shapes[0] == shapes[1]  # next tokens
    taken = Predictions(run_dir / "predictions", split, source, texts, cfg.predict.targets)
    if isinstance(source, TokenRows) and source.row_tokens.answered:
        _answer(cfg, restored, source, taken)
    else:
        evaluate(restored.strategy, source, None, taken)
    taken.finish()
    return taken


def _source(restored: Restored, inputs: Any) -> Source:
    if isinstance(inputs, str):
        return restored.data.source_of(inputs)
    return InMemory(inputs, np.zeros(len(as_tuple(inputs)[0])))


def predict_here(cfg: Root, inputs: Any, run_dir: Path) -> Predictions:
    """Predict with the model of ``checkpoint`` in this process; see ``predict``."""
    restored = restore(cfg, cfg.device, cfg.train.global_batch_size)
    if isinstance(inputs, str):
        restored.data.prepare()
    if restored.data.seq_len is None:  # in which dimensions are the samples of the outputs?
        some = Batch(*_source(restored, inputs).read(np.zeros(2, np.int64), 0))
        (stage,) = restored.strategy.stages
        stage.sample_dims = examine(restored.strategy.chain, some, training=False).sample_dims
    return predict(cfg, restored, inputs, run_dir)


def predictions(cfg: Root, inputs: Any, run_dir: Path) -> Any:
    """Return predictions for arrays or tensors ``inputs``, or for the split of this name; see ``Result.predict``."""
    files = predict_here(cfg, inputs, run_dir).files
    for path in files:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    arrays = [np.load(path) for path in files if not path.name.endswith("_ids.npy")]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def _answer(cfg: Root, restored: Restored, source: TokenRows, taken: Predictions) -> None:
    """Generate the answer to each row's prompt, up to the end token; the last answer of a chat."""
    vocabulary, size = source.row_tokens.vocabulary, cfg.train.global_batch_size
    for first in range(0, len(source), size):
        rows = source.selection.row(np.arange(first, min(first + size, len(source))))
        prompts, wanted = [], []
        each = 1 + source.row_tokens.pairs  # of a pair, the chosen answer
        for tokens, counted in encoded_rows(source.rows, rows, source.row_tokens)[::each]:
            begins = np.flatnonzero(np.diff(counted, prepend=False) & counted)
            begin = int(begins[-1]) if len(begins) else len(tokens)
            prompts.append(tokens[:begin])
            wanted.append(tokens[begin:])
        drawn = continued(cfg, restored, prompts, end=vocabulary.end, first=first)
        columns = {"prompt": prompts, "prediction": drawn, "answer": wanted}
        for key in ("prediction", "answer"):
            columns[key] = [t[: t.index(vocabulary.end)] if vocabulary.end in t else t for t in columns[key]]
        taken.put({key: [*map(vocabulary.decode, one)] for key, one in columns.items()}, len(rows))
