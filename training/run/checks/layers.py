"""Checks the facts of the layers and of the loss that the examination has found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import TrainingError, UserError, add_note
from conf import EVALUATES
from parallel.examination import ERRORS, reads_numbers
from parallel.mixing import check_documents
from parallel.supported import check_facts
from training.run.checks.loss import check_result, check_targets, loss_name

if TYPE_CHECKING:
    from training.run.setup import Setup


def check_examined(setup: Setup) -> None:
    """Check the facts of the layers and of the loss.

    Raises:
        UserError: A layer cannot take its input, its output cannot be passed on, the state that it changes would
            depend on the layout, or its shapes depend on numbers but must be known in advance. The message names the
            layer.
    """
    plan, batch, at, known = setup.plan, setup.sample, "", True
    needs_shapes = plan.pipelined or setup.cfg.train.compile or setup.cfg.mode == "plan"
    try:
        found = setup.examination
        check_facts(found, setup.chain, plan, plan.recompute, setup.cfg.mode not in EVALUATES)
        if batch.documents is not None:
            check_documents(setup.chain, found, plan)
        for facts in found.layers:
            at, known = f"layer {facts.name!r} ({facts.kind}): ", known and not facts.reads_numbers
            if needs_shapes and not known:
                raise reads_numbers(facts.name, facts.kind)
            if facts.error is not None and (not facts.outputs or plan.device_type != "cpu"):
                raise facts.error
        if found.loss is not None:
            at = f"loss {loss_name(setup.chain.loss, found.loss)}: "
            check_result(setup, found.loss)
            check_targets(setup, batch, found.layers[-1].outputs[0])
    except UserError:
        raise
    except ERRORS as error:
        if not known:
            return  # a layer reads numbers, which the meta device lacks: later errors appear in the run
        said = str(error)
        if at and "meta" in said and "device" in said:
            said = "it computes with a tensor that is not on its input's device; use register_buffer or device=x.device"
        raise TrainingError(
            f"model={setup.cfg.model.name} cannot take this data: samples "
            f"{' and '.join(map(_described, batch.input_tensors))} with targets "
            f"{' and '.join(map(_described, batch.target_tensors))} "
            f"({'' if said.startswith(at.removesuffix(': ')) else at}{said})"
        ) from None
    except Exception as error:
        add_note(error, f"raised in {at.removesuffix(': ') or 'the model'}, tried on a micro-batch without memory")
        raise


def _described(tensor: Any) -> str:
    return f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
