"""What a first batch shows before any process starts: what the data set gives, and that model and loss can take it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from common.errors import DataError, PlanError, TrainingError, UserError, add_note
from data.dataset import Batch, Source
from models.chain import checked
from models.losses import check_sums
from parallel.shape_inference import Accesses, reads_numbers


def check_splits(setup: Any) -> None:
    """Check what the data set's ``prepare()`` has left. Raises DataError."""
    data = setup.data
    for split in ("train", "valid", "test"):
        source = getattr(data, split, None)
        if not isinstance(source, Source) and (split == "train" or source is not None):
            raise DataError(
                f"{type(data).__name__}.prepare() left {split}={str(source):.60}; it must leave a data.dataset.Source, "
                "such as InMemory(inputs, targets), in train, valid and test (or None in the last two)"
            )


def check_read(setup: Any) -> None:
    """Check what the data give for one sample. Raises DataError."""
    source = setup.data.train
    given = source.read(np.zeros(1, dtype=np.int64), 0)
    try:
        batch = Batch(*given)
        right = all(isinstance(one, Tensor) and len(one) == 1 for one in (*batch.input_tensors, batch.targets))
    except TypeError:
        right = False
    if not right:
        raise DataError(
            f"{type(source).__name__}.read() must return (inputs, targets): tensors with one row for each index, or a "
            f"tuple of them as inputs. For one index it returned {str(given):.200}"
        )


def check_shapes(setup: Any) -> None:
    """Pass a micro-batch through the model and its loss on the meta device, without memory.

    Raises:
        UserError: A layer cannot take what it is given, its output cannot be passed on, what it leaves behind would
            depend on the layout, or its shapes depend on numbers where they must be known before. It is named.
    """
    chain, sample = setup.chain, setup.sample.to("meta")
    needs_shapes = setup.plan.pipelined or setup.cfg.train.compile or setup.cfg.mode == "plan"
    tensors, at, known = sample.input_tensors, "", True
    try:
        for name, layer in chain.skeleton().items():
            at = f"layer {name!r} ({type(layer).__name__}): "
            with Accesses(layer) as accesses:
                try:
                    output = layer(*tensors)
                except (NotImplementedError, TypeError) as error:  # .tolist(), .numpy(), .cpu()
                    known = known and not any(word in str(error) for word in ("meta tensor", "meta device"))
                    raise
                finally:
                    known = known and not accesses.data_dependent
                    if needs_shapes and not known:
                        raise reads_numbers(name, layer)
            if setup.cfg.mode != "eval" and accesses.changed() is not None:
                _check_changed(setup, at, layer, tensors)
            at = ""
            tensors = checked(name, layer, output)
        at = f"loss {type(chain.loss).__name__}: "
        check_sums(chain.loss, chain.loss(output, sample.targets, None))
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, IndexError) as error:
        if not known:
            return  # what follows is seen when it runs
        said = str(error)
        if at and "meta" in said and "device" in said:
            said = (
                "it computes with a tensor that is not on its input's device; keep such a tensor by register_buffer, "
                "make it with device=x.device"
            )
        raise TrainingError(
            f"model={setup.cfg.model.name} cannot take this data: samples "
            f"{' and '.join(map(_described, sample.input_tensors))} with targets {_described(sample.targets)} "
            f"({at}{said})"
        ) from None
    except Exception as error:
        add_note(error, f"raised in {at.removesuffix(': ') or 'the model'}, tried on a micro-batch without memory")
        raise


def _check_changed(setup: Any, at: str, layer: nn.Module, tensors: tuple[Tensor, ...]) -> None:
    """Refuse a layer that changes its tensors in a second forward too (the first may fill a cache), if that is cut.

    Once per step for the whole batch is what ``single`` does by default, and what users of torch expect.
    """
    with Accesses(layer) as accesses:
        layer(*tensors)
    plan, train, tensor = setup.plan, setup.cfg.train, accesses.changed()
    cut = {f"parallel.dp={plan.dp}": plan.dp > 1, f"parallel.chunks={plan.chunks}": plan.chunks > 1}
    cut["train.activation_checkpointing=true"] = train.activation_checkpointing
    cut[f"parallel={plan.strategy}"] = bool(plan.devices) and len(plan.stages) == 1
    reasons = [words for words, holds in cut.items() if holds]
    if tensor is not None and reasons:
        raise PlanError(
            f"{at}it changes its {tensor!r} in every training forward, so with {' and '.join(reasons)} it would depend "
            "on how the batch is cut. Use models.batchnorm (BatchNorm1d, 2d and 3d, which update once per step) for "
            "BatchNorm, a layer without such state otherwise, or let the whole batch pass at once: parallel=single "
            "parallel.chunks=1 train.activation_checkpointing=false"
        )


def _described(tensor: Any) -> str:
    return f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
