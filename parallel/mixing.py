"""Finds layers and losses that need other positions of a sequence than those that a process has.

Processes that share a sequence compute each layer for some of its positions. Only ``models.attention.attend`` sees the
others. Any other layer must compute each position on its own, and read positions from ``models.sequence``. This is
tried with numbers: layers and loss compute a short sequence, and two parts of it, of which each must get the numbers
that the sequence gets at its positions.

If sequences have several documents, the parts are two documents, and each must get the numbers that it gets alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.errors import PlanError, UserError, brief
from models.chain import CPU, LOSS, Chain, LayerSpec, as_tuple
from models.losses import IGNORED, copy_to_try, loss_of
from models.seeds import Samples, computing
from models.sequence import computing_part
from parallel.examination import Examination
from parallel.layout import Layout

_FEW, _MANY = 17, 257  # numbers of positions; odd, so that a shift by a power of two does not end where it began
_QUICK = 2**28  # parameters of a layer times positions of a short sequence
_LARGE = 2**20  # parameters of a layer that is compared with others, and tried with two draws of integers at most
_DRAWS = 32
_OWN = "Use models.attention.attend, models.sequence.positions, nn.Dropout and a loss that sums over positions"
_REFUSED = {  # facts of a layer or a loss
    "draws": "draws random numbers by itself, the same for each part",
    "gathers": "calls models.losses.gather, which is for whole samples",
}


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
            f"parallel.cp={layout.cp} gives each process a part of every sequence: {found.needs_others}. "
            f"{_OWN + ', or set' if chain.prove_parts is None else 'Set'} parallel.cp=1"
        )
    for name, heads, kv_heads in sorted(found.heads) if layout.context == "ulysses" else ():
        both, ranks = math.gcd(heads, kv_heads), layout.cp * layout.tp
        if both % ranks:
            fit = [f"parallel.cp={n}" for n in range(2, both + 1) if both % (n * layout.tp) == 0]
            raise PlanError(
                f"parallel.context=ulysses divides heads among {ranks} ranks (parallel.cp={layout.cp}, parallel.tp="
                f"{layout.tp}), and {name} has {heads} heads of queries and {kv_heads} of keys and values; set "
                f"{' or '.join(fit) + ' for ulysses, or ' if fit else ''}parallel.context=gather or "
                "parallel.context=ring, which divide no heads"
            )


def check_documents(chain: Chain, found: Examination, layout: Layout) -> None:
    """Check that layers and loss compute documents that share a sequence as they compute each alone.

    Raises:
        PlanError: A layer or the loss does not. The message names it, what was seen, and what to do.
        ModelError: A layer of transformers does not.
    """
    if chain.prove_parts is not None:
        chain.prove_parts(packed=True)
    problem = _problem(chain, found, packed=True)
    if layout.devices and layout.pp == 1:
        problem = f"parallel={layout.strategy} computes copies of the model in threads, which do not know these"
    if problem:
        raise PlanError(f"data.packing puts several documents into a row: {problem}. {_OWN}, or set data.packing=false")


class _NotComputed(PlanError):
    """A layer or the loss fails for a number of positions."""


def _problem(chain: Chain, found: Examination, packed: bool = False) -> str:
    """Return what is wrong with the first layer that needs other positions, or with the loss; empty if nothing is."""
    refused = [f"{_named(chain, name)} {says}" for fact, says in _REFUSED.items() for name in found.which(fact)][:1]
    refused = [] if packed else refused  # the trial is without dropout, and whole
    if refused and chain.prove_parts is None:
        return refused[0]
    assert found.sample is not None
    inputs, targets = found.sample.input_tensors, found.sample.targets
    if packed and inputs[0].shape[1:] == (1,):
        return ""  # a row has one document
    if isinstance(targets, tuple) or targets.dim() < 2 or len({tensor.shape[1:2] for tensor in (*inputs, targets)}) > 1:
        return ""  # the check of the data refuses these
    length = targets.shape[1]
    largest = max(sum(p.numel() for p in layer.parameters()) for _, layer in chain.skeleton().items())
    short = min(length, max(_FEW, min(_MANY, _QUICK // max(largest, 1) | 1)))
    distinct = max((len(x.unique()) for x in inputs if not x.is_floating_point()), default=0)
    problem = ""
    # Parts differ in size, so that quotas of positions do not add up. Some layers compute certain lengths only.
    # Documents end anywhere, so that one of them has an odd length, and no other lengths are tried.
    for count, first in ((short, short * 2 // 5 | packed), (length, length // 2))[: 2 - packed]:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for again in range(1 + min(1 if largest > _LARGE else _DRAWS, -(-2 * distinct // count))):
                    torch.default_generator.manual_seed(again)
                    trial = _Trial(chain, targets, found.heads, count, first, again, packed)
                    walk = chain.walk(tuple(map(trial.drawn, inputs)), trial.check)
                    any(walk) if again else list(walk)  # again, up to a layer that returns no integers
            return "".join(refused)
        except _NotComputed as error:
            problem = str(error)
        except PlanError as error:  # a layer of transformers says what draws
            return refused[0] if refused and error.__cause__ is None else str(error)
    return problem


def _named(chain: Chain, name: str) -> str:
    if name == LOSS:
        return f"the loss {type(chain.loss).__name__}"
    return f"layer {name!r} ({type(chain.skeleton()[name]).__name__})"


@dataclass(eq=False)  # models.causal_lm_layers keeps results for parts
class _Part:
    """A ``models.sequence.SequencePart`` in which each query sees its own key only. It notes the layer's ``heads``."""

    length: int
    positions: Tensor
    name: str
    heads: set[tuple[str, int, int]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None, **_: Any) -> Tensor:
        """Return values times numbers that depend on the query, key and document of the same position."""
        if any(x.dim() != 4 or x.shape[2] != len(self.positions) for x in (q, k, v)):
            raise ValueError(f"attend takes [b, heads, {len(self.positions)}, width], not {list(q.shape)}")
        self.heads.add((self.name, q.shape[1], k.shape[1]))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = (q.sum(-1, keepdim=True) - 2 * k.sum(-1, keepdim=True)).tanh()  # a rotation of both changes it
        return v * (seen if documents is None else seen + documents[:, None, :, None])


class _Trial:
    """Layers and loss compute ``count`` positions of a sequence, any ``first`` of these, and the others.

    If it is ``packed``, the parts are documents, and layers are in eval mode.
    """

    def __init__(
        self,
        chain: Chain,
        targets: Tensor,
        heads: set[tuple[str, int, int]],
        count: int,
        first: int,
        again: int,
        packed: bool = False,
    ) -> None:
        self.chain, self.targets, self.heads, self.count, self.again = chain, targets, heads, count, again
        every, some = torch.arange(count), torch.randperm(count) < first
        some = every < first if packed else some
        self.rows = every, every[some], every[~some]
        self.begins = torch.where(some, 0, first)[None] if packed else None
        self.outputs: dict[str, Any] = {}  # of each kind of layer, for all positions

    def drawn(self, like: Tensor) -> Tensor:
        """Return numbers for one sample. Integers are those of ``like``: four occur often, and the others once."""
        shape = (1, self.count, *like.shape[2:])
        if like.is_floating_point():
            return torch.rand(shape)
        values, counts = like.where(like != IGNORED, like.max()).unique(return_counts=True)
        same = torch.Generator().manual_seed(0)  # so that draws differ in their integers
        size, order = math.prod(shape), torch.randperm(len(values), generator=same)
        most = size - size // 4
        rank = (order + self.again * max(1, most - 5)) % len(values) if self.again else counts
        rank[:4] = rank[-1:] = like.numel() + 1  # where the numbers of special tokens are
        some = values[rank.argsort(descending=True)[:most]]
        some = some[torch.randperm(len(some), generator=same)]
        often = some.chunk(2)[-(self.again % 2)][:4]
        numbers = torch.cat((some, often[torch.randint(len(often), (size - len(some),))]))
        return numbers[torch.randperm(size)].view(shape)

    def check(self, spec: LayerSpec, given: tuple[Tensor, ...]) -> tuple[bool, tuple[Tensor, ...]]:
        """Check a layer, and the loss after the last layer, as ``Chain.walk`` asks. Raises PlanError.

        Returns:
            Whether the layer returns no integers; its output.
        """
        name, skeleton, last = _named(self.chain, spec.name), self.chain.skeleton()[spec.name], self.chain.layers[-1]
        if spec is last and loss_of(skeleton) is not None:
            loss: Any = _with_noise(self.chain, spec.name).loss
            self._check_loss(f"the loss of {name}", loss, given, self.drawn(self.targets))
            return True, ()
        kind = f"{_kind(spec.name, skeleton)} {[(x.shape, x.dtype) for x in given]}"
        if kind not in self.outputs:
            self.outputs[kind] = self._check_layer(name, _with_noise(self.chain, spec.name), given)
        output, tensors = self.outputs[kind], as_tuple(self.outputs[kind])
        if spec is last:
            loss, targets = copy_to_try(self.chain.loss), self.drawn(self.targets)
            if (predicted := tensors[0].argmax(-1)).shape == targets.shape and not targets.is_floating_point():
                targets[:, ::2] = predicted[:, ::2]  # some predictions are right
            of_tensors = loss if isinstance(output, Tensor) else lambda *x: loss(x[:-2], *x[-2:])
            self._check_loss(_named(self.chain, LOSS), of_tensors, tensors, targets)
        # Positions differ, even if all tokens are equal.
        noisy = tuple(x * (torch.rand(x.shape) + 0.5) if x.is_floating_point() else x for x in tensors)
        return all(x.is_floating_point() for x in tensors), noisy

    def _check_layer(self, name: str, module: nn.Module, given: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Return the output for all positions, if the outputs for parts are the same."""
        module = module if self.begins is None else module.eval()

        def call(*x: Tensor) -> Any:  # some layers change their buffers
            return functional_call(module, {key: buffer.clone() for key, buffer in module.named_buffers()}, x)

        output, *of_parts = self._computed(name, call, given)
        if wrong := [list(x.shape) for x in as_tuple(output) if x.shape[:2] != (1, self.count)]:
            raise PlanError(
                f"{name} returns {wrong[0]} for one sample of {self.count} positions, not [1, {self.count}, ...]"
            )
        for rows, part in zip(self.rows[1:], of_parts, strict=True):
            if not all(map(is_near, as_tuple(part), (x[:, rows] for x in as_tuple(output)))):
                raise PlanError(
                    f"{name} mixes positions, or counts them itself (torch.arange): its output for {len(rows)} of "
                    f"{self.count} positions is different without the others"
                )
        return output

    def _check_loss(self, name: str, loss: Callable[..., Any], given: Sequence[Tensor], targets: Tensor) -> None:
        """Check that ``loss(*given, targets, None)`` is a sum over positions."""

        def sums(targets: Tensor) -> list[Tensor]:
            return self._computed(name, lambda *x: loss(*x, None).stack(), (*given, targets))

        try:
            whole, *parts = sums(targets.index_fill(1, self.rows[0][3::5], IGNORED))
        except _NotComputed:  # a user's loss may not know IGNORED
            whole, *parts = sums(targets)
        if not is_near(sum(parts), whole):
            whole, both = ([round(value, 4) for value in x.tolist()] for x in (whole, sum(parts)))
            raise PlanError(
                f"{name} is no sum over positions: [loss, count, metrics ...] of {self.count} positions are {whole}, "
                f"and the sums of two parts of them are {both}"
            )

    def _computed(self, name: str, call: Callable[..., Any], given: Sequence[Tensor]) -> list[Any]:
        """Return what a layer or a loss computes for all positions, and for each part of them."""
        length, results = self.targets.shape[1], []
        positions = torch.linspace(0, length - 1, self.count).round().long()
        for rows in self.rows:
            torch.default_generator.manual_seed(0)
            part = None if self.begins is not None else _Part(length, positions[rows], name, self.heads)
            documents = self.begins if len(rows) == self.count else None
            try:
                with computing_part(part), computing(Samples(1, documents=documents)):
                    results.append(call(*(x[:, rows] for x in given)))
                if any(x.isnan().any() for x in as_tuple(results[-1])):
                    raise ValueError("the result is NaN")
            except UserError as error:
                raise PlanError(f"{name}: {error}") from error
            except Exception as error:  # a user's code
                said = brief(error)
                raise _NotComputed(f"{name} does not compute {len(rows)} of {length} positions ({said})") from error
        return results


def is_near(x: Any, y: Tensor, relative: float = 1e-5) -> bool:
    """Return whether two tensors are equal, up to rounding."""
    x, y = x.double(), y.double()
    return x.shape == y.shape and torch.allclose(x, y, 0.0, relative * float(y.abs().max()))


def _with_noise(chain: Chain, name: str) -> nn.Module:
    module = chain.skeleton([name])[name].to_empty(device=CPU)
    return with_noise(chain.build([name], 0, CPU)[name] if any(True for _ in module.buffers()) else module)


def with_noise(module: nn.Module) -> nn.Module:
    """Let the parameters of a module repeat a few random numbers, so that a large module takes little time."""
    parameters = list(module.parameters())
    noise = torch.randn(max((sum(p.shape) for p in parameters), default=0) + len(parameters) + 1)
    for start, parameter in enumerate(parameters):
        if parameter.dim() < 2:  # it scales or shifts
            parameter.data = (1 + 0.05 * noise[start:][: parameter.numel()]).view(parameter.shape).to(parameter.dtype)
            continue
        # The product with a matrix is about as large as its input. Of more matrices, each begins one number later.
        *more, rows, columns = parameter.shape
        numbers = (noise[start:] * columns**-0.5).to(parameter.dtype)
        matrix = numbers.as_strided((rows + sum(more), columns), (1, 1)).contiguous()
        parameter.data = matrix.as_strided(parameter.shape, (*[1] * len(more), columns, 1))
    return module


def _kind(name: str, module: nn.Module) -> str:
    """Return a text that is the same for large layers without buffers that differ in their own number only."""
    parameters = [(parameter.shape, parameter.dtype) for parameter in module.parameters()]
    if sum(shape.numel() for shape, _ in parameters) <= _LARGE or any(True for _ in module.buffers()):
        return name
    usual = vars(nn.Module())
    own = [{k: v for k, v in vars(part).items() if k not in usual and "idx" not in k} for part in module.modules()]
    return f"{module} {own} {parameters}"
