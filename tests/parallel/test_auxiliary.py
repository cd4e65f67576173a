"""Auxiliary losses of a mixture of experts: in every layout those of a plain loop over the whole global batch."""

import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Layout, planned
from torch import nn

from common.errors import ModelError
from data.dataset import Batch
from models.auxiliary import Collected, attach, collecting
from models.causal_lm import causal_lm
from models.chain import Chain, LayerSpec
from models.losses import IGNORED, SquaredError
from models.moe import moe
from parallel.examination import examine
from parallel.strategy import Options, build_strategy
from tests.models.random_models import random_model

SIZES = dict(n_layer=2, n_head=2, kv_heads=2, head_dim=4, n_embd=8, experts=4, expert_width=6, vocab_size=30)
# Factors so large that a fault of any part of the loss is seen in all weights.
CASES = {
    "losses": dict(balance=0.5, z_loss=0.2),
    "sigmoid scores, a shared expert, a bias": dict(
        balance=0.3, z_loss=0.0, scores="sigmoid", shared_experts=1, bias_rate=0.05, tied=False
    ),
    "a bias only": dict(balance=0.0, z_loss=0.0, bias_rate=0.05, renormalize=False, top_k=1),
    "no losses": dict(balance=0.0, z_loss=0.0),
}
GENERATOR = torch.Generator().manual_seed(5)
TOKENS = [torch.randint(30, (8, 7), generator=GENERATOR) for _ in range(3)]
STEPS, RATE = 3, 0.3


def batch_at(step: int, ignores: bool = True) -> Batch:
    tokens = TOKENS[step - 1]
    targets = tokens[:, 1:].clone()
    if ignores:
        targets[0, 1:] = targets[5, 4:] = IGNORED  # unequally many in the parts of the batch
    return Batch(tokens[:, :-1], targets)


def chain_of_case(case: str) -> Chain:
    return moe(**{**SIZES, **CASES[case]}, block_size=16, init_std=0.4)


def mixed(mlp: nn.Module, x: torch.Tensor, options: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every expert for every token: the output, the auxiliary loss, how many tokens chose each expert."""
    logits = x @ mlp.gate.weight.T
    scores = logits.sigmoid() if options.get("scores") == "sigmoid" else logits.softmax(-1)
    ranked = scores + mlp.gate.bias if options.get("bias_rate") else scores
    least = ranked.topk(options.get("top_k", 2)).values[..., -1:]
    chosen = (ranked >= least).to(x.dtype).detach()
    weights = scores * chosen
    if options.get("renormalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("bte,xfe->btxf", x, mlp.experts.gate_up_proj).chunk(2, -1)
    y = torch.einsum("btxf,xef,btx->bte", F.silu(gate) * up, mlp.experts.down_proj, weights)
    if options.get("shared_experts"):
        y = y + mlp.shared_experts(x)
    tokens = x.shape[0] * x.shape[1]
    shares = (scores / scores.sum(-1, keepdim=True)).sum((0, 1)) / tokens
    balance = len(shares) * ((chosen.sum((0, 1)) / tokens) * shares).sum()
    z = logits.exp().sum(-1).log().square().mean()
    return y, options["balance"] * balance + options["z_loss"] * z, chosen.sum((0, 1))


def in_a_loop(case: str) -> list[dict]:
    chain, options = chain_of_case(case), CASES[case]
    layers = chain.build(chain.names, 7, torch.device("cpu"), torch.float64)
    optimizer, found = torch.optim.SGD(layers.parameters(), RATE), []
    for step in range(1, STEPS + 1):
        batch, auxiliary, choices = batch_at(step), torch.zeros(()), {}
        x = layers["embedding"](batch.inputs)
        for name, block in layers.items()[1:-1]:
            x = x + block.self_attn(block.input_layernorm(x))
            y, own, choices[name] = mixed(block.mlp, block.post_attention_layernorm(x), options)
            x, auxiliary = x + y, auxiliary + own
        loss = F.cross_entropy(layers["head"](x).flatten(0, 1), batch.targets.flatten()) + auxiliary
        optimizer.zero_grad()
        loss.backward()
        seen = {"loss": loss.item(), "auxiliary_loss": auxiliary.item()}
        seen |= {f"gradient of {name}": p.grad.clone() for name, p in layers.named_parameters()}
        optimizer.step()
        for name, count in choices.items():
            if options.get("bias_rate"):
                layers[name].mlp.gate.bias += options["bias_rate"] * (count.mean() - count).sign()
        found.append(seen | {name: value.clone() for name, value in layers.state_dict().items()})
    return found


def strategy_of(chain: Chain, layout: Layout, recompute: bool = False, precision: str = "fp64", sample=None):
    world = dist.get_world_size() if dist.is_initialized() else 1
    sample = batch_at(1) if sample is None else sample
    plan = planned(layout, chain, len(sample), precision=precision, where={"world_size": world, "recompute": recompute})
    mesh = plan.mesh(dist.get_rank() if world > 1 else 0).connect(60)
    microbatch = sample.chunks(plan.dp * plan.chunks)[0]
    plan = replace(plan, **examine(chain, microbatch).for_plan())
    return build_strategy(plan, chain, mesh, Options(seed=7, timeout_s=60), microbatch, 0)


def trained(layout: Layout, case: str, recompute: bool, evaluate: bool = True) -> list[dict]:
    """What this rank sees in each step: its numbers, gradients and weights under the names of the whole model."""
    strategy = strategy_of(chain_of_case(case), layout, recompute)
    optimizer, found = torch.optim.SGD(strategy.parameters(), RATE), []
    for step in range(1, STEPS + 1):
        mine = batch_at(step).chunks(strategy.plan.dp)[strategy.mesh.replica]
        result = strategy.train_step(mine, step)
        seen = {"loss": result.loss, **result.metrics}
        named = {f"gradient of {name}": (name, p.grad) for name, p in strategy.named_parameters()}
        seen |= {name: strategy.whole(*pair).clone() for name, pair in named.items()}
        optimizer.step()
        found.append(seen | {n: strategy.whole(n, p).detach().clone() for n, p in strategy.state_dict().items()})
        if evaluate:
            strategy.eval_step(mine)
    return found


ONE = [(Layout("single", chunks=chunks), recompute) for chunks in (1, 2, 4) for recompute in (False, True)]
SEVERAL = [
    (Layout("ddp", dp=2), False),
    (Layout("ddp", dp=2, chunks=2), True),
    (Layout("fsdp", dp=2), False),
    (Layout("fsdp", dp=2, chunks=2), True),
    (Layout("fsdp", dp=2, chunks=2, reshard=False), False),
    (Layout("pipelined", pp=2, chunks=2, schedule="1f1b"), False),
    (Layout("pipelined", pp=2, chunks=4, schedule="interleaved_zero_bubble"), False),
    (Layout("model_parallel", pp=2, chunks=2), False),
    (Layout("tensor", tp=2), False),
    (Layout("tensor", tp=2, chunks=2, sequence=True), True),
    (Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b"), True),
    (Layout("pipe_fsdp", dp=2, pp=2, chunks=2), False),
]


@pytest.fixture(scope="module")
def loops():
    return {case: in_a_loop(case) for case in CASES}


def marked(cells: list, quick: list) -> list:
    """Cells as parameters; those that are not in ``quick`` are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(*cell, marks=slow * (cell not in quick), id=", ".join(map(str, cell))) for cell in cells]


EVERY = [(*pair, case) for case in CASES for pair in ONE + SEVERAL]
FEW = [ONE[3], SEVERAL[10]]
MORE = [*FEW, ONE[0], *(SEVERAL[i] for i in (3, 4, 6, 7, 9))]
QUICK = [(*pair, case) for case in CASES for pair in (MORE if case == "losses" else FEW)]


@pytest.mark.parametrize("layout, recompute, case", marked(EVERY, QUICK))
def test_losses_gradients_weights_and_biases_are_those_of_a_plain_loop(ranks, loops, layout, recompute, case):
    run = ranks.run(layout.processes, trained, layout, case, recompute)
    names = set()
    for step, wanted in enumerate(loops[case]):
        for rank in run:
            for name, value in rank[step].items():
                near = torch.as_tensor(wanted[name], dtype=torch.float64)
                assert (value - near).norm() <= 1e-12 * near.norm().clamp(min=1e-3), (step, name)
                names.add(name)
    skipped = {"auxiliary_loss"} if not (CASES[case]["balance"] or CASES[case]["z_loss"]) else set()
    assert names == loops[case][0].keys() - skipped - chain_of_case(case).tied.keys()


LIBRARY = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 2, "norm_topk_prob": True},  # every second layer has experts
    "olmoe": {},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 8,
        "kv_lora_rank": 8, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
ONE_DEVICE = [(kind, Layout("single"), factor) for kind in LIBRARY for factor in (None, 0.001, 0.5)]
SEVERAL_DEVICES = [
    ("mixtral", Layout("single", chunks=4), 0.5),
    ("qwen3_moe", Layout("fsdp", dp=2, chunks=2), 0.5),
    ("mixtral", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b"), 0.5),
]


def in_a_chain(layout: Layout, folder: Path, weights: dict, rate: float) -> tuple[list[float], list[float], dict]:
    """The losses of three steps with and without the routers', and the weights under the library's names."""
    chain = causal_lm(str(folder))
    strategy, losses, auxiliary = strategy_of(chain, layout), [], []
    their_name = chain.hugging_face.their_name
    strategy.load_state_dict({name: weights[their_name(name)] for name in chain.skeleton().state_dict()})
    optimizer = torch.optim.SGD(strategy.parameters(), rate)
    for step in range(1, STEPS + 1):
        result = strategy.train_step(batch_at(step, False).chunks(strategy.plan.dp)[strategy.mesh.replica], step)
        losses.append(result.loss)
        auxiliary.append(result.metrics.get("auxiliary_loss", 0.0))
        optimizer.step()
    state = {their_name(name): strategy.whole(name, p).detach().clone() for name, p in strategy.state_dict().items()}
    return losses, auxiliary, state


def in_float64(module, monkeypatch) -> None:
    """Let a module of transformers compute its balance in float64."""
    code = inspect.getsource(module.load_balancing_loss_func)
    exec(code.replace("float32", "float64").replace(".float()", ".double()"), module.__dict__ | (own := {}), own)
    monkeypatch.setattr(module, "load_balancing_loss_func", own["load_balancing_loss_func"])


@pytest.mark.parametrize(
    "kind, layout, factor", marked(ONE_DEVICE + SEVERAL_DEVICES, [*ONE_DEVICE[:3], ONE_DEVICE[5], SEVERAL_DEVICES[1]])
)
def test_a_mixture_of_transformers_is_trained_as_by_the_library(ranks, tmp_path, monkeypatch, kind, layout, factor):
    """The library adds up scores in float32 in a model of float64, too: here only with its usual factor, 0.001.

    Its norms, which compute in float32, enlarge this rounding from step to step.
    """
    adds = {} if factor is None else {"output_router_logits": True, "router_aux_loss_coef": factor}
    model = random_model(kind, **LIBRARY[kind], **adds).double().train()
    model.set_experts_implementation("eager")  # torch's grouped products have no float64
    model.config.save_pretrained(tmp_path)
    if factor == 0.5 and kind != "deepseek_v3":
        in_float64(sys.modules[type(model).__module__], monkeypatch)
    initial, losses = {name: tensor.clone() for name, tensor in model.state_dict().items()}, []
    optimizer = torch.optim.SGD(model.parameters(), rate := 0.01 if factor == 0.001 else RATE)
    for step in range(1, STEPS + 1):
        batch = batch_at(step, ignores=False)
        output = model(batch.inputs, labels=batch.targets, use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten())  # the library's is in float32
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + factor * output.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    near = 1e-9 if factor == 0.001 else 1e-12
    for found, auxiliary, state in ranks.run(layout.processes, in_a_chain, layout, tmp_path, initial, rate):
        assert found == pytest.approx(losses, rel=near)
        assert all(bool(value) == (factor is not None and kind != "deepseek_v3") for value in auxiliary)
        for name, tensor in state.items():
            assert (tensor - model.state_dict()[name]).norm() <= near * tensor.norm(), name


@pytest.mark.parametrize("kind", ["mixtral", "moe"])
def test_tokens_are_counted_exactly_in_16_bits(tmp_path, kind):
    """A sum in bfloat16 does not count beyond 256, and there are 1,008 tokens."""
    if kind == "moe":
        chain = chain_of_case("losses")
    else:
        random_model(kind, output_router_logits=True).config.save_pretrained(tmp_path)
        chain = causal_lm(str(tmp_path))
    batch, losses = batch_at(1, ignores=False), {}
    batch = Batch(*(tensor.repeat(21, 1) for tensor in (batch.inputs, batch.targets)))
    for precision in ("fp64", "bf16"):
        strategy = strategy_of(chain, Layout("single"), precision=precision, sample=batch)
        losses[precision] = strategy.train_step(batch, 1).metrics["auxiliary_loss"]
    assert losses["bf16"] == pytest.approx(losses["fp64"], rel=1e-2)


def test_sums_of_16_bits_are_refused():
    with collecting(Collected()), pytest.raises(ModelError, match="do not count beyond 256"):
        attach(torch.ones(2), "choices", torch.ones(3, dtype=torch.bfloat16), torch.sum)


def overflowing(layout: Layout) -> list[dict]:
    """A step whose gradients overflow, then two that do not, in float16 from a large scale of the loss."""
    strategy = strategy_of(chain_of_case("sigmoid scores, a shared expert, a bias"), layout, precision="fp16")
    found, strategy.loss_scale.scale = [], 2.0**14
    for step in range(1, STEPS + 1):
        mine = batch_at(step).chunks(strategy.plan.dp)[strategy.mesh.replica]
        first = next(iter(strategy.parameters()))
        hook = first.register_hook(lambda gradient: gradient * float("inf")) if step == 1 else None
        result = strategy.train_step(mine, step)
        if hook is not None:
            hook.remove()
        strategy.loss_scale.update(result)
        biases = [tensor.clone() for name, tensor in strategy.state_dict().items() if name.endswith("gate.bias")]
        found.append({"finite": result.finite, "loss": result.loss, "norm": result.grad_norm, "biases": biases})
    return found


def test_the_scale_of_the_loss_scales_auxiliary_losses_and_a_skipped_step_moves_no_bias(ranks):
    (one,) = ranks.run(1, overflowing, Layout("single"))
    assert [step["finite"] for step in one] == [False, True, True]
    assert not any(bias.any() for bias in one[0]["biases"]) and all(bias.any() for bias in one[1]["biases"])
    for rank in ranks.run(2, overflowing, Layout("ddp", dp=2, chunks=2)):
        for mine, wanted in zip(rank[1:], one[1:], strict=True):
            assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert mine["norm"] == pytest.approx(wanted["norm"], rel=2e-2)
            assert all(map(torch.equal, mine["biases"], wanted["biases"]))


def resumed(layout: Layout, case: str, state: dict) -> dict:
    """The numbers of the last step, from the weights and biases that the steps before have left."""
    strategy = strategy_of(chain_of_case(case), layout)
    strategy.load_state_dict(state)
    mine = batch_at(STEPS).chunks(strategy.plan.dp)[strategy.mesh.replica]
    evaluation = strategy.all_sum(strategy.eval_step(mine))
    result = strategy.train_step(mine, STEPS)  # moves biases
    return {"loss": result.loss, **result.metrics, "evaluation": evaluation[0] / evaluation[1]}


@pytest.mark.parametrize("layout", [Layout("single", chunks=2), Layout("fsdp", dp=2, chunks=2)], ids=str)
def test_a_step_goes_on_with_biases_and_an_evaluation_has_the_loss_of_the_tokens_alone(ranks, loops, layout):
    case = "sigmoid scores, a shared expert, a bias"
    before, wanted = loops[case][-2:]
    state = {name: tensor for name, tensor in before.items() if isinstance(tensor, torch.Tensor)}
    for found in ranks.run(layout.processes, resumed, layout, case, state):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        assert found["evaluation"] == pytest.approx(wanted["loss"] - wanted["auxiliary_loss"], rel=1e-12)


class Penalized(nn.Linear):
    """Adds the mean square of its outputs to the loss."""

    full_name = ""

    def forward(self, x):
        y = super().forward(x)
        sums = torch.stack((y.square().sum(), y.new_tensor(y.numel())))
        return attach(y, self.full_name, sums, lambda totals: totals[0] / totals[1])


@pytest.mark.parametrize("layout", [Layout("single", chunks=2), Layout("pipelined", pp=2, chunks=2)], ids=str)
def test_layers_of_one_kind_have_a_loss_each(ranks, layout):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layers = penalized().build(["first", "last"], 7, torch.device("cpu"), torch.float64)
    hidden = layers["first"](x)
    wanted = hidden.square().mean().item() + layers["last"](hidden).square().mean().item()
    for found in ranks.run(layout.processes, penalty, layout, x):
        assert found == pytest.approx(wanted, rel=1e-12)


def penalized() -> Chain:
    build = partial(Penalized, 3, 3)
    return Chain([LayerSpec("first", build), LayerSpec("last", build)], SquaredError())


def penalty(layout: Layout, x: torch.Tensor) -> float:
    strategy = strategy_of(penalized(), layout, sample=Batch(x, x))
    return strategy.train_step(Batch(x, x), 1).metrics["auxiliary_loss"]


class Leaning(nn.Linear):
    """A layer whose outputs have a mean that the training loss contains."""

    def forward(self, x):
        x = super().forward(x).tanh()
        return attach(x, "leaning", x.float().sum()[None], lambda totals: totals[0] / 64)


class Following(nn.Module):
    """Subtracts a mean that each training forward moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(dim=0).to(self.mean), 0.5)
        return x - self.mean


def moved(layout: Layout) -> dict[str, torch.Tensor]:
    linear = [(name, partial(kind, 8, 8)) for name, kind in (("first", nn.Linear), ("lean", Leaning))]
    layers = [LayerSpec(*spec) for spec in (*linear, ("follow", Following), ("last", partial(nn.Linear, 8, 8)))]
    draw = torch.Generator().manual_seed(1)
    batch = Batch(*torch.randn(2, 8, 8, generator=draw, dtype=torch.float64))
    strategy = strategy_of(Chain(layers, SquaredError()), layout, sample=batch)
    strategy.train_step(batch, 1)
    return {name: tensor.clone() for name, tensor in strategy.state_dict().items() if name.endswith("mean")}


def test_a_pass_in_advance_does_not_move_what_a_forward_changes(ranks):
    ((one,), two) = ranks.run(1, moved, Layout()), ranks.run(2, moved, Layout("pipelined", pp=2))
    torch.testing.assert_close({**two[0], **two[1]}, one)
    assert one["follow.mean"].abs().min() > 0
