"""Predictions for a split: the outputs of the last layer as arrays, or lines of JSON; one row per sample, in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib import format as npy
from torch import Tensor

from conf.schema import Root
from data.dataset import DataSet, InMemory, Source
from data.jsonl import TokenRows, encoded_rows
from models.losses import IGNORED
from training.run.evaluate import evaluate
from training.run.restore import Restored, continued, restore

FOLDER = "predictions"
Columns = dict[str, Any]  # some rows by the names of arrays or fields: a tensor or a list each
Put = Callable[[Columns], None]


class Predictions:
    """The taker of the outputs of a split (see ``parallel.outputs.Taker``). It needs no loss."""

    alone = True

    def __init__(self, put: Put | None, texts: bool, targets: bool = False) -> None:
        """Pass each global batch to ``put``, which may be None on ranks other than 0.

        Args:
            put: Gets "loss" and "tokens" of texts, otherwise "output", or "output_0", "output_1", ... of several.
            texts: Whether samples are texts. Then the losses of each text's tokens are summed.
            targets: Whether it gets "targets", too; "targets_0", "targets_1", ... of several.
        """
        self._put, self._texts, self._targets = put, texts, targets

    def select(self, outputs: tuple[Tensor, ...], targets: Any) -> tuple[Tensor, ...]:
        """See ``Taker``. Of texts, return the loss of each token, which is small beside the logits."""
        if not self._texts:
            return outputs
        logits = outputs[0].to(torch.promote_types(outputs[0].dtype, torch.float32)).flatten(0, 1)
        return (F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(targets),)

    def take(self, selected: tuple[Tensor, ...], targets: Any) -> None:
        """See ``Taker``."""
        if self._texts:
            columns = {"loss": selected[0].double().sum(1), "tokens": (targets != IGNORED).sum(1)}
        elif len(selected) == 1:
            columns = {"output": selected[0]}
        else:
            columns = {f"output_{i}": tensor for i, tensor in enumerate(selected)}
        assert self._put is not None  # on rank 0
        several = targets if isinstance(targets, tuple) else ()
        named = {f"targets_{i}": one for i, one in enumerate(several)} if several else {"targets": targets}
        self._put(columns | named if self._targets else columns)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """Return columns as rows of plain numbers, lists and texts."""
    lists = [one.tolist() if isinstance(one, Tensor) else one for one in columns.values()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def has_texts(data: DataSet, source: Source) -> bool:
    """Return whether each sample of a split is a text, whose next tokens are its targets."""
    inputs, targets = source.read(np.zeros(1, np.int64), 0)
    shapes = [of.shape for of in (inputs, targets) if isinstance(of, Tensor)]
    return data.seq_len is not None and len(shapes) == 2 and shapes[0] == shapes[1]


def prepared(cfg: Root, split: str) -> tuple[Restored, Source]:
    """Return the model of ``checkpoint`` in this process, and a split of its data."""
    restored = restore(cfg, cfg.device, cfg.train.global_batch_size)
    restored.data.prepare()
    return restored, restored.data.source_of(split)


@contextmanager
def writing(run_dir: Path, split: str, source: Source, lines: bool) -> Iterator[Put]:
    """Write what ``put`` gets to ``predictions/SPLIT.jsonl``, or to ``predictions/SPLIT.npy`` and others.

    The files have their names when they are complete. Ids of the samples are added, if the data have them.

    Args:
        run_dir: The run directory.
        split: The name of the split.
        source: The samples. ``put`` gets them in their order.
        lines: Whether to write lines of JSON, not arrays.
    """
    folder, files, row, names = run_dir / FOLDER, {}, 0, []
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def opened(name: str) -> Any:
            if name not in files:
                files[name] = stack.enter_context(open(folder / f"{name}.part", "wb"))
            return files[name]

        def put(columns: Columns) -> None:
            nonlocal row
            count = len(next(iter(columns.values())))
            ids = source.ids(np.arange(row, row + count))
            row += count
            if lines:
                rows = rows_of(columns if ids is None else {"id": ids, **columns})
                opened(f"{split}.jsonl").write(
                    "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in rows).encode()
                )
                return
            names.extend(ids or ())
            for key, one in columns.items():
                array, name = one.numpy(), f"{split}_{key}.npy".replace("_output", "")
                if name not in files:
                    shape = (len(source) * len(array) // count, *array.shape[1:])
                    header = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
                    npy.write_array_header_2_0(opened(name), header)
                files[name].write(array.tobytes())

        yield put
        if names:
            np.save(opened(f"{split}_ids.npy"), np.array(names))
    for name in files:
        (folder / f"{name}.part").replace(folder / name)


def describe_predictions(run_dir: Path, split: str, source: Source) -> str:
    """Return a sentence about the files of predictions."""
    files = sorted(path.name for path in (run_dir / FOLDER).glob(f"{split}*"))
    return f"predictions for the {len(source):,} samples of {split}: {run_dir / FOLDER}/{{{','.join(files)}}}"


def predict(cfg: Root, restored: Restored, source: Source, put: Put) -> None:
    """Predict each sample of a split in this process: answers to prompts, losses of other texts, or arrays."""
    if isinstance(source, TokenRows) and source.row_tokens.answered:
        _answer(cfg, restored, source, put)
    else:
        evaluate(
            restored.strategy, source, None, Predictions(put, has_texts(restored.data, source), cfg.predict.targets)
        )


def _answer(cfg: Root, restored: Restored, source: TokenRows, put: Put) -> None:
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
        put({key: [vocabulary.decode(tokens) for tokens in one] for key, one in columns.items()})


def predictions(cfg: Root, inputs: Any) -> Any:
    """Return predictions for arrays or tensors ``inputs``, or for the split of this name; see ``Result.predict``."""
    found: list[Columns] = []
    if isinstance(inputs, str):
        restored, samples = prepared(cfg, inputs)
        predict(cfg, restored, samples, found.append)
    else:
        first, *_ = inputs if isinstance(inputs, tuple) else (inputs,)
        samples = InMemory(inputs, np.zeros(len(first)))
        strategy = restore(cfg, cfg.device, cfg.train.global_batch_size).strategy
        evaluate(strategy, samples, None, Predictions(found.append, texts=False))
    if not any(key.startswith("output") for key in found[0]):
        rows, ids = [row for columns in found for row in rows_of(columns)], samples.ids(np.arange(len(samples)))
        return rows if ids is None else [{"id": one, **row} for one, row in zip(ids, rows, strict=True)]
    arrays = [torch.cat([columns[key] for columns in found]).numpy() for key in found[0]]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]
