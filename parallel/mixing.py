"""Finds layers and losses that need other positions of a sequence than those that a process has.

Processes that share a sequence compute each layer for some of its positions. Only ``models.attention.attend`` sees the
others. Any other layer must compute each position on its own, and read positions from ``models.sequence``. This is
tried with numbers: one layer of each kind computes a short sequence, the same with changes at some positions, and two
parts of it. Parameters repeat a few random numbers, so that a large layer takes little time.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from common.errors import PlanError, UserError
from data.dataset import Batch
from models.chain import CPU, LOSS, Chain, LayerSpec, as_tuple, checked
from models.losses import IGNORED, copy_to_try, loss_of
from models.seeds import Samples, computing
from models.sequence import computing_part
from parallel.examination import Examination
from parallel.layout import Layout

_FEW, _MANY = 17, 257  # numbers of positions; odd, so that a shift by a power of two does not end where it began
_QUICK, _SLOW = 2**28, 2**33  # parameters of a layer times positions: for a short sequence, and for whole ones at most
_LARGE = 2**20  # elements of a parameter that is not drawn, and parameters of a layer that is compared with others
_SAME = 1e-5  # relative difference that may come from rounding


def check_positions(chain: Chain, found: Examination, layout: Layout) -> None:
    """Check that layers and loss can compute some positions of a sequence without the others.

    Args:
        chain: The model.
        found: Its examination, which keeps the result for other layouts.
        layout: A layout whose processes share sequences.

    Raises:
        PlanError: A layer or the loss cannot. The message names it, what was seen, and what to do.
    """
    if found.needs_others is None:
        found.needs_others = _problem(chain, found)
    if found.needs_others:
        raise PlanError(
            f"parallel.cp={layout.cp} gives each process a part of every sequence: {found.needs_others}. Use "
            "models.attention.attend, models.sequence.positions, nn.Dropout and a loss that is a sum over positions, "
            "or set parallel.cp=1"
        )
    for name, heads, kv_heads in sorted(found.heads) if layout.context == "ulysses" else ():
        both, ranks = math.gcd(heads, kv_heads), layout.cp * layout.tp
        if both % ranks:
            fit = [f"parallel.cp={n}" for n in range(2, both + 1) if both % (n * layout.tp) == 0]
            raise PlanError(
                f"parallel.context=ulysses divides heads of attention among {ranks} ranks (parallel.cp={layout.cp}, "
                f"parallel.tp={layout.tp}), and {name} has {heads} heads of queries and {kv_heads} of keys and values; "
                f"set {', '.join([*fit, 'parallel.context=gather'])} or parallel.context=ring"
            )


class _Fails(PlanError):
    """Raised if a layer or the loss does not compute a number of positions."""


def _problem(chain: Chain, found: Examination) -> str:
    """Return what is wrong with the first layer that needs other positions, or with the loss; empty if nothing is."""
    for facts in filter(None, (*found.layers, found.loss)):
        if facts.draws:
            return f"{_named(chain, facts.name, facts.kind)} draws random numbers by itself, the same for each part"
        if facts.gathers:
            return f"{_named(chain, facts.name, facts.kind)} calls models.losses.gather, which is for whole samples"
    assert found.sample is not None
    tensors = (*found.sample.input_tensors, found.sample.targets)
    if found.sample.targets.dim() < 2 or len({tensor.shape[1:2] for tensor in tensors}) > 1:
        return ""  # the check of the data refuses these
    length = found.sample.targets.shape[1]
    largest = max(sum(p.numel() for p in layer.parameters()) for _, layer in chain.skeleton().items())
    count = min(length, max(_FEW, min(_MANY, _QUICK // max(largest, 1) | 1)))
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0)) < (count * 2 + 4) // 5
    every = torch.arange(length)
    ends = (every < length // 4) | (every >= length - length // 4)  # as the first of two processes
    tries = [(torch.linspace(0, length - 1, count).round().long(), mixed)]
    tries += [(every, ends)] * (largest * length <= _SLOW)  # some layers compute certain lengths only
    problem = ""
    for positions, some in tries:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                _Trial(chain, found.sample, positions, some, found.heads).check()
            return ""
        except PlanError as error:
            problem = str(error)
            if not isinstance(error, _Fails):
                break
    return problem


def _named(chain: Chain, name: str, kind: str) -> str:
    return f"layer {name!r} ({kind})" if name != LOSS else f"the loss {type(chain.loss).__name__}"


@dataclass(eq=False)  # models.causal_lm_layers keeps results for parts
class _Part:
    """A ``models.sequence.SequencePart`` in which each query sees its own key only."""

    length: int
    positions: Tensor
    heads: set[tuple[int, int]] = field(default_factory=set)  # of queries, and of keys and values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None, **_: Any) -> Tensor:
        """Return values times numbers that depend on the query, key and document of the same position."""
        if any(x.dim() != 4 or x.shape[2] != len(self.positions) for x in (q, k, v)):
            raise ValueError(f"attend takes [b, heads, {len(self.positions)}, width], not {list(q.shape)}")
        self.heads.add((q.shape[1], k.shape[1]))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = (q.sum(-1, keepdim=True) - 2 * k.sum(-1, keepdim=True)).tanh()  # a rotation of both changes it
        return v * (seen if documents is None else seen + documents[:, None, :, None])


@dataclass
class _Trial:
    """Layers and loss compute ``positions`` of a sequence, and two parts of these: ``some``, and the others."""

    chain: Chain
    sample: Batch
    positions: Tensor
    some: Tensor
    heads: set[tuple[str, int, int]]
    known: dict[str, Any] = field(default_factory=dict)  # the output of each kind of layer

    def check(self) -> None:
        """Check the layers and the loss. Raises PlanError."""
        self.rows = torch.arange(len(self.positions))
        self.parts = self.rows[self.some], self.rows[~self.some]
        torch.default_generator.manual_seed(0)
        list(self.chain.walk(tuple(map(self._drawn, self.sample.input_tensors)), self._tried))

    def _drawn(self, like: Tensor) -> Tensor:
        """Return numbers for one sample. Integers lie between the smallest and the largest number of ``like``."""
        shape = (1, len(self.rows), *like.shape[2:])
        if like.is_floating_point():
            return torch.rand(shape)
        low, high = (int(x) for x in like.where(like != IGNORED, like.max()).aminmax())
        numbers = torch.randint(low, high + 1, shape, dtype=like.dtype)
        numbers[:, 1::4], numbers[:, 2::4] = low, high  # where the numbers of special tokens are
        return numbers

    def _tried(self, spec: LayerSpec, given: tuple[Tensor, ...]) -> tuple[None, tuple[Tensor, ...]]:
        """Check a layer, and the loss after the last layer. Return the layer's output."""
        without, last = self.chain.skeleton()[spec.name], spec is self.chain.layers[-1]
        name = _named(self.chain, spec.name, type(without).__name__)
        make = partial(_with_numbers, self.chain, spec.name, any(x.is_floating_point() for x in given))
        if last and loss_of(without) is not None:
            loss: Any = make().loss
            self._check_loss(f"the loss of {name}", loss, given, self._drawn(self.sample.targets))
            return None, ()
        key = f"{_recipe(spec.name, without)} {[(x.shape, x.dtype) for x in given]}"
        if key not in self.known:
            self.known[key] = self._check_layer(name, make(), given)
        output, tensors = self.known[key], as_tuple(self.known[key])
        if last:
            loss, targets = copy_to_try(self.chain.loss), self._drawn(self.sample.targets)
            if (predicted := tensors[0].argmax(-1)).shape == targets.shape and not targets.is_floating_point():
                targets[:, ::2] = predicted[:, ::2]  # some predictions are right
            of_tensors = loss if isinstance(output, Tensor) else lambda *x: loss(x[:-2], *x[-2:])
            self._check_loss(_named(self.chain, LOSS, ""), of_tensors, tensors, targets)
        # Positions differ, even if all tokens are equal.
        return None, tuple(x * (torch.rand(x.shape) + 0.5) if x.is_floating_point() else x for x in tensors)

    def _check_layer(self, name: str, module: nn.Module, given: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Return the output for all positions."""
        outputs: list[Any] = []

        def call(*x: Tensor) -> tuple[Tensor, ...]:
            buffers = {key: buffer.clone() for key, buffer in module.named_buffers()}  # some layers change theirs
            x = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in x)
            with torch.enable_grad():
                outputs.append(functional_call(module, buffers, tuple(tensor.clone() for tensor in x)))
                if cubes := [y.double().pow(3).sum() for y in as_tuple(outputs[-1]) if y.requires_grad]:
                    torch.stack(cubes).sum().backward()  # squares would be constant after a norm
            # 1 is added, so that gradients of rounding errors only are equal.
            return *checked(name, module, outputs[-1]), *(1 + tensor.grad for tensor in x if tensor.grad is not None)

        count = len(self.rows)
        whole = self._called(name, call, given, self.rows)
        if wrong := [list(x.shape) for x in whole if x.shape[:2] != (1, count)]:
            raise PlanError(f"{name} returns {wrong[0]} for one sample of {count} positions, not [1, {count}, ...]")
        at = self.rows[[0, count // 2, -1]]
        others = self.rows[~torch.isin(self.rows, at)]
        changed = tuple(x.index_copy(1, at, x.roll(1, 1)[:, at]) for x in given)
        if not _equal(self._called(name, call, changed, self.rows), whole, others, others):
            raise PlanError(f"{name} mixes positions: changes at three of {count} change its output at others")
        for part in self.parts:
            if not _equal(self._called(name, call, given, part), whole, self.rows[: len(part)], part):
                raise PlanError(
                    f"{name} mixes positions, or counts them itself (torch.arange): its output for {len(part)} of "
                    f"{count} positions is different without the others"
                )
        return outputs[0]

    def _check_loss(self, name: str, loss: Callable[..., Any], given: tuple[Tensor, ...], targets: Tensor) -> None:
        """Check that ``loss(*given, targets, None)`` is a sum over positions."""

        def sums(targets: Tensor) -> list[Tensor]:
            call = lambda *x: loss(*x, None).stack()  # noqa: E731
            return [self._called(name, call, (*given, targets), rows) for rows in (self.rows, *self.parts)]

        try:
            whole, *parts = sums(targets.index_fill(1, self.rows[3::5], IGNORED))
        except _Fails:  # a user's loss may not know IGNORED
            whole, *parts = sums(targets)
        both = torch.stack(parts).sum(0)
        if not torch.allclose(whole, both, _SAME, _SAME * float(whole.abs().max())):
            whole, both = ([round(value, 4) for value in x.tolist()] for x in (whole, both))
            raise PlanError(
                f"{name} is no sum over positions: [loss, count, metrics ...] of {len(self.rows)} positions are "
                f"{whole}, and the sums of two parts of them are {both}"
            )

    def _called(self, name: str, call: Callable[..., Any], given: tuple[Tensor, ...], rows: Tensor) -> Any:
        """Call a layer or a loss for some rows of the positions."""
        torch.default_generator.manual_seed(0)
        part = _Part(self.sample.targets.shape[1], self.positions[rows])
        try:
            with computing_part(part), computing(Samples(1)):
                output = call(*(x[:, rows] for x in given))
            self.heads |= {(name, *heads) for heads in part.heads}
            if any(x.isnan().any() for x in as_tuple(output)):
                raise ValueError("the result is NaN")
            return output
        except UserError as error:
            raise PlanError(f"{name}: {error}") from error
        except Exception as error:  # a user's code
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise _Fails(f"{name} does not compute {len(rows)} of {part.length} positions ({said})") from error


def _equal(some: tuple[Tensor, ...], whole: tuple[Tensor, ...], rows: Tensor, of: Tensor) -> bool:
    """Return whether rows of some tensors equal those of others, up to rounding."""
    for x, y in zip(some, whole, strict=True):
        most = _SAME * float(y.abs().max()) if y.is_floating_point() else 0.0
        if x.shape[1] <= rows.max() or not torch.allclose(x[:, rows].double(), y[:, of].double(), 0.0, most):
            return False
    return True


class _Undrawn(TorchFunctionMode):
    """Does not draw large parameters, which therefore need neither time nor memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        written, name = next(iter((*args, *(kwargs or {}).values())), None), getattr(function, "__name__", "")
        if isinstance(written, nn.Parameter) and written.numel() > _LARGE and name.endswith("_") and name[-2:] != "__":
            written.data[(0,) * written.dim()] = 0  # models.causal_lm_layers notices whether the first number is set
            return written
        return function(*args, **kwargs or {})


def _with_numbers(chain: Chain, name: str, used: bool) -> nn.Module:
    """Return a layer whose parameters repeat few random numbers. ``used`` is whether products need all of them."""
    with _Undrawn():
        module = chain.build([name], 0, CPU)[name]
    parameters = list(module.requires_grad_(False).parameters())
    noise = torch.randn(max((sum(p.shape) for p in parameters), default=0) + len(parameters) + 1)
    for start, parameter in enumerate(parameters):
        # The product with a matrix is about as large as its input. Vectors scale and shift.
        numbers = noise[start:] * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.05 * noise[start:]
        view = numbers.to(parameter.dtype).as_strided(parameter.shape, [1] * parameter.dim())
        if parameter.dim() == 3 and parameter.shape[0] <= parameter.shape[2]:  # experts, which begin side by side
            rows = view[0].new_empty(parameter.shape[1] + 1, parameter.shape[2])
            rows.copy_(numbers.as_strided(rows.shape, (1, 1)))
            view = rows.as_strided(parameter.shape, (1, parameter.shape[2], 1))
        elif used:  # otherwise each product would copy the view
            view = view.contiguous()
        parameter.data = view
    return module


def _recipe(name: str, module: nn.Module) -> str:
    """Return a text that differs for layers on the meta device that may compute differently.

    Large layers without buffers have equal texts if only their own number differs, layer_idx.
    """
    parameters = [(path, parameter.shape, parameter.dtype) for path, parameter in module.named_parameters()]
    if sum(shape.numel() for _, shape, _ in parameters) <= _LARGE or any(True for _ in module.buffers()):
        return name
    words, number, of_all = [], name.rpartition(".")[2], vars(nn.Module()).keys()
    for path, part in module.named_modules():
        own = [(key, value) for key, value in vars(part).items() if key not in of_all]
        own = [(key, _content(value)) for key, value in own if "idx" not in key or str(value) != number]
        words += [path, id(type(part)), own]
    return str([parameters, words])


def _content(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except Exception:  # a function of a user
        return id(value)
