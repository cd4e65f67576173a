"""The optimizer over this rank's share of the parameters, and the learning-rate schedules.

A schedule is a class with a method ``factor(step, total, per_epoch)``, which returns the factor on ``optim.lr`` for a
step, counted from 1, of ``total`` steps with ``per_epoch`` steps per epoch. It is a pure function, so that a schedule
has no state to resume.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.errors import PlanError, TrainingError
from conf import OWN_KEYS
from conf.instantiate import build, resolve, target_of
from models.chain import Chain
from parallel.pieces import Boxes, Piece, is_shared, local, shared_like
from parallel.plan import Plan
from parallel.strategies import names_where
from parallel.strategy import Strategy

_FUSED = ("cpu", "cuda", "mps")

# Values of ``optim.update``: the update of an element depends only on the gradients of that element, or of its tensor.
ELEMENTWISE, PER_PARAMETER = "elementwise", "per_parameter"
# For torch's optimizers: the kind of update, and the number of state tensors of a parameter's size. Adafactor keeps
# rows and columns.
_OF_TORCH = {
    "Adadelta": (ELEMENTWISE, 2), "Adagrad": (ELEMENTWISE, 1), "Adam": (ELEMENTWISE, 2), "AdamW": (ELEMENTWISE, 2),
    "Adamax": (ELEMENTWISE, 2), "ASGD": (ELEMENTWISE, 1), "NAdam": (ELEMENTWISE, 2), "RAdam": (ELEMENTWISE, 2),
    "RMSprop": (ELEMENTWISE, 1), "Rprop": (ELEMENTWISE, 2), "SGD": (ELEMENTWISE, 0), "SparseAdam": (ELEMENTWISE, 2),
    "Adafactor": (PER_PARAMETER, 0), "Muon": (PER_PARAMETER, 1),
}  # fmt: skip


class Optimizer:
    """The optimizer of a configuration over this rank's parameters; does nothing on a rank that has none.

    Weight decay applies to matrices; biases and the scales of norms are left out unless ``decay_vectors`` is set.
    ``rates`` has factors on the learning rate of the parameters of some modules. If the section has ``others``, the
    optimizer (Muon) updates the matrices of hidden layers, and a second one all other parameters; see
    ``hidden_matrices``. One fused kernel updates all parameters of one rate if the optimizer and the device have it.

    If parameters are sharded, an elementwise optimizer updates this rank's box as a plain tensor. An optimizer that
    needs whole tensors gets them one after the other: parameter, gradient and state are gathered, every rank computes
    the same update, and keeps its box.

    Args:
        config: The section ``optim`` as plain data.
        strategy: The model whose parameters to optimize.

    Attributes:
        base_lr: The learning rate that a schedule's factor applies to.
        kind: The optimizer's ``_target_``, and that of ``others`` if it differs.
    """

    def __init__(self, config: Mapping[str, Any], strategy: Strategy) -> None:
        self.base_lr: float = config["lr"]
        self.kind = _kind(config)
        self._parts: list[_Part] = []
        parameters = [(name, p) for name, p in strategy.named_parameters() if p.requires_grad]
        fused = strategy.device.type in _FUSED and all(s.device == strategy.device for s in strategy.stages)
        if config.get("others") is None:
            sections = [(config, parameters)]
        else:
            hidden = hidden_matrices(strategy.chain)
            matrices = [(name, p) for name, p in parameters if name in hidden]
            rest = [(name, p) for name, p in parameters if name not in hidden]
            sections = [(config, matrices), (config["others"], rest)]
        shared = {key: config.get(key) for key in ("decay_vectors", "rates")}
        exact = strategy.plan.precision in ("fp32", "fp64")
        for section, own in sections:
            whole_only = update_of(section) == PER_PARAMETER
            alone = [(name, p) for name, p in own if whole_only and strategy.piece(name, p).axes]
            together = [(name, p) for name, p in own if not (whole_only and strategy.piece(name, p).axes)]
            for part, gathers in (*(([pair], True) for pair in alone), (together, False)):
                if part:
                    self._parts.append(_Part({**section, **shared}, part, strategy, gathers, fused, exact))
        # All learning rates follow one schedule, each scaled by its ratio to the base rate.
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["ratio"] = group["lr"] / self.base_lr if self.base_lr else 1.0

    def step(self, lr: float) -> None:
        """Update the parameters once at learning rate ``lr``. Ranks that share parameters call this together."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr * group["ratio"]
            part.step()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's tensors for one parameter, such as exp_avg; empty before the first step."""
        return {key: value for part in self._parts for key, value in part.state_of(parameter).items()}

    def load_state_of(self, parameter: torch.nn.Parameter, state: Mapping[str, Boxes]) -> None:
        """Replace those tensors. ``step`` counters stay on the device where torch keeps them.

        Args:
            parameter: A parameter of this rank.
            state: Whole tensors, or objects that return boxes of them. For sharded parameters, this rank's box is read.
        """
        for part in self._parts:
            part.load_state_of(parameter, state)


class _Part:
    """An optimizer of torch. Plain tensors stand in for parameters shared by FSDP; others are optimized directly.

    With ``gathers``, parameters that ranks share are gathered for the update. ``exact``: Muon in float32.
    """

    def __init__(
        self,
        config: Mapping,
        parameters: list[tuple[str, nn.Parameter]],
        strategy: Strategy,
        gathers: bool,
        fused: bool,
        exact: bool,
    ) -> None:
        self._strategy, self._gathers = strategy, gathers
        self._names = {parameter: name for name, parameter in parameters}
        self._own = {parameter: self._stand_in(parameter) for _, parameter in parameters}
        self.optimizer = _build(config, [(name, self._own[parameter]) for name, parameter in parameters], fused)
        if exact and type(self.optimizer) is torch.optim.Muon:
            self.optimizer = ExactMuon(self.optimizer.param_groups, **self.optimizer.defaults)
        self._at_first = [_numbers(one) for one in self.optimizer.param_groups]
        if gathers:
            self._scatter()

    def _stand_in(self, parameter: nn.Parameter) -> Tensor:
        if self._gathers:
            return self._whole(parameter, parameter.detach())
        return local(parameter.detach()) if is_shared(parameter) else parameter

    def _whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return self._strategy.whole(self._names[parameter], tensor)

    @torch.no_grad()
    def step(self) -> None:
        if self._gathers:
            self._gather()
        for parameter, own in self._own.items():
            if own is not parameter and parameter.grad is not None:
                own.grad = self._whole(parameter, parameter.grad) if self._gathers else local(parameter.grad)
        self.optimizer.step()
        for parameter, own in self._own.items():
            if own is not parameter:
                own.grad = None
        if self._gathers:
            self._scatter()

    def _gather(self) -> None:
        for parameter, own in self._own.items():
            own.data = self._whole(parameter, parameter.detach())
            self._change_state(own, partial(self._whole, parameter))

    @torch.no_grad()
    def _scatter(self) -> None:
        """Keep this rank's part of the whole tensors."""
        for parameter, own in self._own.items():
            piece = self._strategy.piece(self._names[parameter], parameter)
            piece.tensor.copy_(piece.read(own))

            def share(value: Tensor, like: nn.Parameter = parameter, piece: Piece = piece) -> Tensor:
                return shared_like(like, piece.read(value).clone()) if tuple(value.shape) == piece.shape else value

            self._change_state(own, share)
            own.data = own.new_zeros(()).expand(piece.shape)  # keeps the shape without memory

    def _change_state(self, own: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        state = self.optimizer.state.get(own, {})
        state.update({key: change(value) for key, value in state.items() if torch.is_tensor(value)})

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        own = self._own.get(parameter)
        if own is None:
            return {}
        state = dict(self.optimizer.state.get(own, {}))
        if not state:
            return {}
        group, at_first = self._group_of(own)
        changed = {f"{_GROUP}{key}": value for key, value in _numbers(group).items() if value != at_first.get(key)}
        numbers = _numbers(state | changed).items()
        plain = {_named(key, value): torch.tensor(value, dtype=torch.float64) for key, value in numbers}
        tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
        if own is not parameter and not self._gathers:
            tensors = {key: shared_like(parameter, t) if _is_like(t, own) else t for key, t in tensors.items()}
        return tensors | plain

    def load_state_of(self, parameter: nn.Parameter, state: Mapping[str, Boxes]) -> None:
        own = self._own.get(parameter)
        if own is None:
            return
        group, _ = self._group_of(own)
        loaded = self.optimizer.state[own] = {}
        for key, value in state.items():
            name, plain, kind = key.partition(_PLAIN)
            if plain:
                number = {"int": int, "float": float}[kind](value[...].item())
                if name.startswith(_GROUP):
                    group[name.removeprefix(_GROUP)] = number
                else:
                    loaded[name] = number
                continue
            placed = _placed_as(self._strategy.piece(self._names[parameter], parameter), parameter, key, value, group)
            loaded[key] = placed if self._gathers else local(placed)

    def _group_of(self, own: Tensor) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the group of a parameter, and the group's numbers when it was made."""
        groups = zip(self.optimizer.param_groups, self._at_first, strict=True)
        return next(pair for pair in groups if any(own is one for one in pair[0]["params"]))


# Names in a checkpoint of numbers that are not tensors: "d#float" of a parameter, "group.k#int" of its group (Prodigy).
_PLAIN, _GROUP = "#", "group."


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter's state or of a group that an optimizer may change.

    The learning rate is not among them, because the schedule sets it.
    """
    return {k: v for k, v in values.items() if type(v) in (int, float) and k not in ("lr", "ratio")}


def _named(key: str, value: float) -> str:
    return f"{key}{_PLAIN}{type(value).__name__}"


def _is_like(value: Any, own: Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == own.shape


class ExactMuon(torch.optim.Muon):
    """torch's Muon, except that it orthogonalises in the gradients' dtype.

    In torch's bfloat16, the last bit of a gradient moves the loss by 1e-4 within 20 steps.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters that have a gradient; there is no ``closure`` in training."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
                update = _orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * _muon_factor(group["adjust_lr_fn"], *parameter.shape))


def _muon_factor(adjust: str | None, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix, by ``adjust_lr_fn``."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _orthogonalised(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _kind(config: Mapping[str, Any]) -> str:
    kind, others = config["_target_"], (config.get("others") or config)["_target_"]
    return kind if others == kind else f"{kind} for the matrices of hidden layers and {others} for the others"


def hidden_matrices(chain: Chain) -> set[str]:
    """Return the names of the trainable matrices of a model's hidden layers. Tied ones have their canonical names.

    The matrices that are left out are embeddings, the model's output layer, which is the last module that has a matrix
    itself, and those tied to them.
    """
    outer, found = {chain.embedding}, []
    for layer_name, layer in chain.skeleton().items():
        for name, module in layer.named_modules(prefix=layer_name):
            own = module.named_parameters(name, recurse=False)
            matrices = {chain.canonical(key): p.requires_grad for key, p in own if p.dim() == 2}
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                outer.update(matrices)
            if matrices:
                found.append(matrices)
    outer.update(*found[-1:])
    return {name for matrices in found for name, trained in matrices.items() if trained} - outer


def _build(
    config: Mapping, parameters: list[tuple[str, Tensor]], fused: bool, place: str = "optim"
) -> torch.optim.Optimizer:
    arguments = {key: value for key, value in config.items() if key not in OWN_KEYS["optim"]}
    known = inspect.signature(resolve(config["_target_"])).parameters
    spared = "weight_decay" in known and not config["decay_vectors"]
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        key = factor, decays = _factor(name, config["rates"] or {}), parameter.dim() >= 2 or not spared
        group = {"params": [], "lr": config["lr"] * factor} | ({} if decays else {"weight_decay": 0.0})
        groups.setdefault(key, group)["params"].append(parameter)
    if fused and "fused" in known and arguments.get("fused") is None and not arguments.get("foreach"):
        arguments["fused"] = True
    try:
        return build(place, arguments, list(groups.values()))
    except TrainingError as error:
        hint = "; the others need one too: 'optim.others={_target_: torch.optim.AdamW, lr: 1e-3}'"
        raise TrainingError(f"optim: {error}{hint if '2D' in str(error) else ''}") from None
    except (IndexError, KeyError, TypeError, RuntimeError) as error:
        raise TrainingError(f"optim: {config['_target_']} cannot take these values: {error}") from error


def _factor(name: str, rates: Mapping[str, float]) -> float:
    """Return the factor on the learning rate of a parameter: the product of the factors of all modules around it."""
    return math.prod(factor for module, factor in rates.items() if _is_in(name, module))


def _is_in(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def _placed_as(piece: Piece, parameter: torch.nn.Parameter, key: str, value: Boxes, group: Mapping[str, Any]) -> Tensor:
    """Return a state tensor on the parameter's device, in its memory order, since fused kernels walk both together.

    For a parameter that ranks share this is this rank's part, which is that of ``piece``.
    """
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value[...].cpu().clone()  # the host reads it in every update
    if tuple(value.shape) != piece.shape:
        return value[...].to(parameter.device)
    own = piece.read(value)
    state = torch.empty_like(parameter, dtype=own.dtype, requires_grad=False)
    local(state).copy_(own)
    return state


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Build the optimizers of the section ``optim`` for a parameter of one element, before anything else is built.

    Raises:
        TrainingError: An optimizer has no learning rate, or refuses a value of the section, such as a negative one.
    """
    for place, section in (("optim", config), ("optim.others", config.get("others"))):
        if not section:
            continue
        kind = target_of("optim", section)
        if section is not config and (twice := {"decay_vectors", "rates", "others"} & section.keys()):
            key = min(twice)
            raise TrainingError(f"optim.others.{key} has no effect: optim.{key} applies to both optimizers")
        if "lr" not in section:
            raise TrainingError(f"optim: {section['_target_']} needs a learning rate (lr), which the schedule changes")
        if type(lr := section["lr"]) not in (int, float) or not math.isfinite(lr):
            raise TrainingError(f"{place}.lr={lr!r} must be a finite number, such as 1e-3: {section['_target_']}")
        if lr == 0 and section is config and config.get("others"):
            raise TrainingError("optim.lr=0: the rate of optim.others follows optim.lr; set optim.lr to a small number")
        for key, value in section.items():  # torch refuses values below 0, but NaN is not below 0
            numbers = value if isinstance(value, Sequence) else [value]
            if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
                raise TrainingError(f"{place}.{key}={value} must be finite: {section['_target_']}")
        closure = inspect.signature(getattr(kind, "step", kind)).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TrainingError(
                f"optim: {section['_target_']} evaluates the loss several times per step (a closure), which training "
                "in micro-batches does not; use another optimizer"
            )
        one = ("", nn.Parameter(torch.zeros(1, 1)))
        _build({"decay_vectors": True, **section, "rates": None}, [one], fused=False, place=place)


def _of_torch(section: Mapping[str, Any]) -> tuple[str, int] | None:
    module, _, name = section["_target_"].rpartition(".")
    return _OF_TORCH.get(name) if f"{module}.".startswith("torch.optim.") else None


def update_of(section: Mapping[str, Any]) -> str | None:
    """Return what an update of the section's optimizer depends on: "elementwise" or "per_parameter"; None: unknown."""
    known = _of_torch(section)
    return section.get("update") if known is None else known[0]


def states_of(section: Mapping[str, Any], unknown: int = 2) -> int:
    """Count the tensors of a parameter's size that an optimizer keeps for it; ``unknown`` if it is not torch's.

    ``others`` of the section do not count.
    """
    known = _of_torch(section)
    momentum = section["_target_"].endswith(".SGD") and bool(section.get("momentum"))
    return unknown if known is None else known[1] + momentum


def mean_states(section: Mapping[str, Any], chain: Chain) -> float:
    """Return how many tensors of a parameter's size the section's optimizers keep, on average over a model."""
    others = section.get("others")
    if others is None:
        return states_of(section)
    sizes = {name: p.numel() for name, p in chain.skeleton().named_parameters() if p.requires_grad}
    share = sum(sizes[name] for name in hidden_matrices(chain)) / sum(sizes.values())
    return share * states_of(section) + (1 - share) * states_of(others)


def check_layout(config: Mapping[str, Any], plan: Plan, chain: Chain) -> None:
    """Check that the section's optimizers can work on each rank's part of the model.

    Raises:
        PlanError: An optimizer may depend on all parameters at once, and the layout splits them.
    """
    copies = len(plan.stages) > 1 and chain.tied  # two stages may have the same tied parameter
    if plan.pipelined or plan.tp > 1 or plan.mesh(0).shards > 1 or copies:
        check_apart(config, plan.strategy)


def check_apart(config: Mapping[str, Any], strategy: str) -> None:
    """Check that the section's optimizers can work with a strategy that gives no rank the whole model.

    Raises:
        PlanError: An optimizer may depend on all parameters at once.
    """
    whole = names_where(stages=False, shards="", gpu_only=False, only_tensor=False)
    ways_out = " or ".join(f"parallel={name}" for name in whole)
    for section in filter(None, (config, config.get("others"))):
        if update_of(section) not in (ELEMENTWISE, PER_PARAMETER):
            raise PlanError(
                f"optim: {section['_target_']} may compute one number from all parameters (as Prodigy and normalised "
                f"SGD do), and parallel={strategy} gives no rank the model in one piece. If it does not, add to its "
                "section 'update: elementwise' if the update of an element depends only on the gradients of that "
                "element (Lion), or 'update: per_parameter' if it depends on those of its tensor (LAMB). Otherwise "
                f"use {ways_out}"
            )


def check_others(config: Mapping[str, Any], chain: Chain) -> None:
    """Check that a model has matrices of hidden layers if the optimizer is only for these; raise TrainingError."""
    if config.get("others") is not None and not hidden_matrices(chain):
        kind, others = (section["_target_"] for section in (config, config["others"]))
        raise TrainingError(
            f"optim: {kind} is for the matrices of hidden layers, and this model trains none. Embeddings, the output "
            f"layer, convolutions, biases and norms use {others} (optim.others). Use that alone, such as optim=adamw"
        )


def check_rates(rates: Mapping[str, float] | None, chain: Chain) -> None:
    """Check ``optim.rates``; raise TrainingError for a factor below 0, or a module without parameters."""
    if not isinstance(rates or {}, Mapping):
        raise TrainingError(f"optim.rates={rates} must be factors by module, such as {{fc: 10, layer4.0: 0.1}}")
    names = [name for name, _ in chain.skeleton().named_parameters()]
    for module, factor in (rates or {}).items():
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise TrainingError(f"optim.rates.{module}={factor} must be a number of at least 0, and finite")
        if not any(_is_in(name, module) for name in names):
            parts = sorted({part for name in names for part in name.split(".")[:-1]})
            known = [part for part in parts if not part.isdecimal()] or parts
            raise TrainingError(f"optim.rates: the model has no module {module!r}; it has {', '.join(known)}")


class Constant:
    """The same learning rate throughout."""

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return 1 for every step."""
        return 1.0


class Step:
    """Multiplied by ``gamma`` after every ``every`` epochs or steps (torch's StepLR).

    Args:
        every: Length of a period, in units.
        unit: "step" or "epoch".
        gamma: Factor from one period to the next.

    Raises:
        TrainingError: The period is below 1.
    """

    def __init__(self, every: int = 1, unit: Literal["step", "epoch"] = "epoch", gamma: float = 0.95) -> None:
        if every < 1:
            raise TrainingError(f"scheduler.every={every} must be at least 1")
        self.every, self.unit, self.gamma = every, unit, gamma

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return ``gamma`` to the power of the number of completed periods."""
        period = self.every * (per_epoch if self.unit == "epoch" else 1)
        return self.gamma ** ((step - 1) // period)


class CosineWarmup:
    """Linear from 1/warmup_steps to 1, then half a cosine down to ``min_ratio`` (GPT-3's schedule, as in nanoGPT).

    Args:
        warmup_steps: Length of the linear part, in steps. None: ``warmup_ratio`` of the run.
        min_ratio: The factor at the end, in [0, 1].
        warmup_ratio: The linear part as a fraction of the run, in [0, 1].

    Raises:
        TrainingError: A number is outside of these ranges.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.1, warmup_ratio: float = 0.2) -> None:
        in_range = 0.0 <= min_ratio <= 1.0 and 0.0 <= warmup_ratio <= 1.0
        if (warmup_steps is not None and warmup_steps < 0) or not in_range:
            raise TrainingError(
                f"scheduler.warmup_steps={warmup_steps} must be 0 or more, and scheduler.min_ratio={min_ratio} and "
                f"scheduler.warmup_ratio={warmup_ratio} in [0, 1]"
            )
        self.warmup_steps, self.min_ratio, self.warmup_ratio = warmup_steps, min_ratio, warmup_ratio

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the factor in [0, 1]; it is 1 at the end of the warm-up."""
        warmup = round(total * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, total - warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
