"""The optimizer: rates by numbers worked out by hand, which parameters decay, how the update runs, what is resumed."""

import json
import re
from collections import OrderedDict

import pytest
import torch
from composed import config, for_rank, losses, run, run_layout, run_on_rank, same_bits, saved, training
from torch import nn

from common.errors import CheckpointError, PlanError, TrainingError
from conf.instantiate import add_to_path, to_dict, with_values
from models.sequential import chain_of
from parallel.strategy import Options, build_strategy
from planner.memory import memory_of_ranks
from training.optimizer import WSD, Constant, CosineWarmup, Linear, Optimizer, Step
from training.optimizer.checks import check_by_module, check_optimizer
from training.optimizer.groups import decay_of, is_within
from training.optimizer.kinds import mean_states
from training.optimizer.muon import hidden_matrices
from training.run.prepare import build_chain, prepare

ADAMW = ["optim=adamw", "optim.weight_decay=0.5"]


@pytest.fixture
def toy():
    """``toy(*overrides)``: the toy model on one process, and its optimizer."""

    def build(*overrides):
        cfg = config(*overrides)
        setup = prepare(cfg)
        mesh = setup.plan.mesh(0).connect(timeout_s=60)
        strategy = build_strategy(setup.plan, setup.chain, mesh, Options(seed=1), setup.sample, 0)
        return strategy, Optimizer(to_dict(cfg.optim), strategy)

    return build


def step_without_gradient(strategy, optimizer, lr):
    """One update in which only weight decay can act; the parameters before it and after it."""
    parameters = dict(strategy.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(lr)
    return before, parameters


@pytest.mark.parametrize("vectors", [False, True])
def test_only_matrices_decay_unless_vectors_are_to_do_so_too(toy, vectors):
    before, after = step_without_gradient(*toy(*ADAMW, f"optim.decay_vectors={vectors}"), lr=0.1)
    assert {p.dim() for p in before.values()} == {1, 2}
    for name, old in before.items():
        expected = old * (1 - 0.1 * 0.5) if old.dim() == 2 or vectors else old
        torch.testing.assert_close(after[name].detach(), expected)


@pytest.mark.parametrize("decays", [True, False])
def test_the_parameters_of_a_module_have_a_rate_of_their_own(toy, decays):
    words = ["optim=sgd", "optim.momentum=0", "optim.rates={net2: 10, bias: 0.5}", f"optim.decay_vectors={decays}"]
    strategy, optimizer = toy(*words)
    before = {name: p.detach().clone() for name, p in strategy.named_parameters()}
    for parameter in strategy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    moved = {name: (before[name] - p.detach()).mean().item() for name, p in strategy.named_parameters()}
    rates = {"net1.weight": 0.1, "net1.bias": 0.05, "net2.weight": 1.0, "net2.bias": 0.5}
    assert moved == pytest.approx(rates, rel=1e-4)


@pytest.mark.parametrize("vectors", [False, True])
def test_the_innermost_module_decides_how_much_a_parameter_decays(toy, vectors):
    decays = "{net1: 0.2, net2: 0, net2.weight: 0.3, net2.bias: 0.4}"
    before, after = step_without_gradient(
        *toy(*ADAMW, f"optim.decays={decays}", f"optim.decay_vectors={vectors}"), lr=0.1
    )
    expected = {"net1.weight": 0.2, "net1.bias": 0.2 * vectors, "net2.weight": 0.3, "net2.bias": 0.4}
    for name, old in before.items():
        torch.testing.assert_close(after[name].detach(), old * (1 - 0.1 * expected[name]), msg=name)


@pytest.mark.parametrize(
    "name, decays, expected",
    [
        ("h.0.attn.weight", {"h": 1, "attn": 2, "h.0": 3}, 2),
        ("h.0.attn.weight", {"attn": 1, "h.0.attn": 2}, 2),
        ("h.0.attn.weight", {"h.1": 1, "mlp": 2}, None),
        ("0.layers.0.weight", {0: 1, "layers": 2}, 2),
        ("0.layers.0.weight", {"layers.0": 1, 0: 2}, 1),
    ],
)
def test_of_several_modules_around_a_parameter_the_innermost_counts(name, decays, expected):
    assert decay_of(name, False, decays) == expected


def assert_it_resumes_with_the_same_bits(cfg, folder):
    """A run of four steps, and one that goes on from its second."""
    length = {"train.epochs": None, "train.steps": 4, "train.checkpoint_every": 2}
    for name, resume in (("whole", None), ("resumed", str(folder / "whole/checkpoints/step-00000002"))):
        (folder / name).mkdir()
        training(with_values(cfg, {**length, "train.resume": resume}), folder / name)
    assert same_bits(folder / "resumed", folder / "whole", 4)


@pytest.mark.parametrize("name", ["NAdam", "Rprop", "Muon"])
def test_any_optimizer_of_torch_trains_by_its_name_alone(name, tmp_path):
    """Those of a YAML that holds nothing but the target; Muon is for matrices, and leaves the others to AdamW."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    others = {"_target_": "torch.optim.AdamW", "lr": 0.001} if name == "Muon" else None
    optim = {"_target_": f"torch.optim.{name}", "lr": 0.01, "decay_vectors": False, "rates": None, "others": others}
    assert_it_resumes_with_the_same_bits(with_values(config("optim=adamw"), {"optim": optim}), tmp_path)


UNDECLARED = """
import torch


class Normalised(torch.optim.SGD):
    \"""Divides by the norm of all gradients.\"""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            group["done"], group["sum"] = group.get("done", 0) + 1, group.get("sum", torch.zeros(1)) + 1
        self.state["k"], self.state["n"] = self.state.get("k", torch.zeros(1)) + 1, self.state.get("n", 0) + 1
        torch.nn.utils.clip_grad_norm_(parameters, 1.0 / self.param_groups[0]["done"])
        for parameter in parameters:
            own = self.state[parameter]
            own["steps"], own["mean"] = own.get("steps", 0) + 1, 0.5 * own.get("mean", 0.0) + 1.0
            own["odd"] = not own.get("odd", False)
            parameter.grad /= own["steps"] + own["mean"] + own["odd"] + self.state["k"].item() * self.state["n"]
            parameter.grad /= self.param_groups[0]["sum"]
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


class Remembers(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = self.state[parameter], parameter.grad
                parameter -= group["lr"] * (2 * gradient - own.get("last", gradient) + sum(own.get("all", [])))
                own["last"], own["all"] = gradient.detach(), [*own.get("all", []), gradient]
"""


@pytest.fixture
def own_optimizer(tmp_path):
    """``own_optimizer(parallel, update)``: the configuration of the toy model with an optimizer of one's own."""
    (tmp_path / "own_optimizers.py").write_text(UNDECLARED)

    def configured(*parallel, update=None, place="optim", name="Normalised"):
        cfg = config(f"import_from=['{tmp_path}']", "train.global_batch_size=8", *parallel)
        add_to_path(cfg.import_from)
        own = {"_target_": f"own_optimizers.{name}", "lr": 0.1, "update": update}
        whole = {"_target_": "torch.optim.SGD", "lr": 0.1, "others": own} if place == "others" else own
        return with_values(cfg, {"optim": {"decay_vectors": False, "rates": None, "others": None, **whole}})

    return configured


@pytest.mark.parametrize("name", ["fsdp", "pipelined"])
def test_an_optimizer_that_may_need_the_whole_model_is_refused_where_no_rank_has_it(own_optimizer, name):
    for place in ("optim", "others"):
        with pytest.raises(PlanError) as refused:
            prepare(own_optimizer(f"parallel={name}", place=place))
        for words in ("own_optimizers.Normalised", f"parallel={name} ", "update: per_parameter", "parallel=ddp"):
            assert words in str(refused.value)
    assert prepare(own_optimizer(f"parallel={name}", update="per_parameter")).plan.strategy == name
    assert prepare(own_optimizer("parallel=ddp")).plan.strategy == "ddp"


def test_numbers_that_an_optimizer_keeps_outside_of_tensors_are_resumed(own_optimizer, tmp_path):
    assert_it_resumes_with_the_same_bits(own_optimizer(), tmp_path)


def test_the_noise_of_an_optimizer_does_not_depend_on_the_micro_batches_and_so_not_on_the_replica(
    own_optimizer, tmp_path
):
    found = []
    for chunks in (1, 2):
        (folder := tmp_path / str(chunks)).mkdir()
        cfg = own_optimizer(f"parallel.chunks={chunks}", "train.precision=fp64", name="Noisy")
        training(with_values(cfg, {"train.epochs": None, "train.steps": 3}), folder)
        found.append(losses(folder))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_gradient_that_an_optimizer_keeps_is_the_same_in_the_next_step(own_optimizer, ranks, tmp_path):
    section = to_dict(own_optimizer(name="Remembers").optim)
    words = [f"import_from=['{tmp_path}']", "train.precision=fp64", "train.epochs=null", "train.steps=4"]
    one, two = (run_layout(ranks, at, tmp_path / at, *words, optim=section) for at in ("single", "ddp"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-12)


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("optim=muon", "optim=muon optim.others._target_=torch.optim.NAdam",
         "saved with optim .*AdamW for the others, this run has .*NAdam for the others"),
        ("optim=sgd", "optim=sgd optim.others={_target_:torch.optim.AdamW,lr:0.1}",
         "saved with optim torch.optim.SGD, this run has torch.optim.SGD for the matrices of hidden layers and"),
        ("optim=sgd", "optim=sgd optim.others={_target_:torch.optim.SGD,lr:0.1}",
         "saved with optim torch.optim.SGD, this run has torch.optim.SGD for the matrices of hidden layers and"),
    ],
    ids=["another", "one more", "one more of the same class"],
)  # fmt: skip
def test_another_optimizer_for_the_others_is_no_silent_loss_of_its_state(tmp_path, before, after, said):
    short = ["train.epochs=null", "train.steps=2", "train.checkpoint_every=1"]
    run(tmp_path / "whole", *before.split(), *short)
    with pytest.raises(CheckpointError, match=said):
        resume = f"train.resume='{tmp_path}/whole/checkpoints/step-00000001'"
        run(tmp_path / "other", *after.split(), *short, resume)


def test_an_option_that_needs_a_state_which_the_checkpoint_lacks_is_an_error_that_names_both(tmp_path):
    words = ["optim=adam", "train.epochs=null", "train.steps=2", "train.checkpoint_every=1"]
    run(tmp_path / "whole", *words)
    resume = f"train.resume='{tmp_path}/whole/checkpoints/step-00000001'"
    with pytest.raises(TrainingError, match="Adam needs the state 'max_exp_avg_sq' of each parameter, and the check"):
        run(tmp_path / "other", *words, "optim.amsgrad=true", resume)


class Restless(torch.optim.SGD):
    """Changes what checkpoints have no place for, and takes its options as they come."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)

    def step(self, closure=None):
        for group in self.param_groups:
            group["betas"], group["done"] = (0.9, group.get("done", 0)), group.get("done", 0) + 1
            self.state["all"], self.state["large"] = {"done": group["done"]}, torch.zeros(3)
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(parameter.grad)
                self.state[parameter][0] = parameter.grad
        return super().step(closure)


@pytest.fixture
def restless(toy):
    return toy("optim=sgd", "optim.weight_decay=0.5", f"optim._target_={__name__}.Restless")


def test_what_a_checkpoint_cannot_keep_of_an_optimizer_is_said_once(restless, caplog):
    strategy, optimizer = restless
    assert all(optimizer.state_of(parameter) == {} for parameter in strategy.parameters()) and not caplog.text
    step_without_gradient(strategy, optimizer, lr=0.1)
    kept = [optimizer.state_of(parameter) for parameter in strategy.parameters()]
    assert all("group.done#int" in state for state in kept)
    assert len(caplog.records) == 1
    said = "Restless keeps history, 0, group.betas, shared.all, shared.large as neither a number nor a named tensor"
    assert said in caplog.text


def test_what_a_checkpoint_does_not_have_of_a_group_is_as_at_the_beginning(restless):
    strategy, optimizer = restless
    step_without_gradient(strategy, optimizer, lr=0.1)
    (group,) = [group for made in optimizer.made for group in made.param_groups if group["weight_decay"]]
    assert group["done"] == 1 and group["betas"] == (0.9, 0)
    for parameter in strategy.parameters():
        optimizer.load_state_of(parameter, {})
    assert "done" not in group and "betas" not in group and group["weight_decay"] == 0.5


def test_vectors_do_not_decay_by_an_optimizer_that_passes_its_options_on(restless):
    before, after = step_without_gradient(*restless, lr=0.1)
    assert {name for name, old in before.items() if not torch.equal(old, after[name].detach())} == {
        "net1.weight",
        "net2.weight",
    }


def test_a_module_whose_parameters_are_all_tied_is_not_unknown():
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    chain = chain_of(nn.Sequential(OrderedDict(first=first, last=last)), nn.MSELoss())
    check_by_module("optim.rates", {"first": 2}, chain, "")
    with pytest.raises(TrainingError, match=r"all parameters of last are tied to others; .* module of first\.weight"):
        check_by_module("optim.rates", {"last": 2}, chain, "")


def test_a_child_of_a_sequential_is_not_every_child_of_its_number():
    names = ["0.0.weight", "1.0.weight", "2.1.weight", "a.0.weight"]
    assert [name for name in names if is_within(name, "0")] == ["0.0.weight"]
    assert [name for name in names if is_within(name, "a.0")] == ["a.0.weight"]


MODELS = {
    "tied": ("gpt2", r"h\.\d\.(attn|mlp)\.c_\w+\.weight", 8),
    "untied": ("transformer", r"layers\.\d\.(linear\d\.|self_attn.(in_proj_|out_proj\.))weight", 8),
    "classes": ("classifier", r"fc[123]\.1\.weight", 3),
}


@pytest.mark.parametrize("model, pattern, count", MODELS.values(), ids=MODELS)
def test_muon_has_the_matrices_of_hidden_layers_and_adamw_embeddings_and_the_output_layer(model, pattern, count):
    cfg = config(f"model={model}", *["model.n_layer=2"] * (model != "classifier"))
    chain = build_chain(cfg.model, 100)
    hidden = hidden_matrices(chain)
    assert len(hidden) == count and all(re.fullmatch(pattern, name) for name in hidden)


def test_muon_leaves_norms_of_two_dimensions_to_adamw():
    class NormalizedLinear(nn.Linear):
        pass

    layers = [nn.Embedding(9, 6), nn.LayerNorm((5, 6)), nn.Linear(6, 6), NormalizedLinear(6, 6), nn.Linear(6, 3)]
    found = hidden_matrices(chain_of(nn.Sequential(*layers), nn.CrossEntropyLoss()))
    assert found == {"2.weight", "3.weight"}


def test_adapters_are_hidden_and_what_is_frozen_is_not_trained():
    cfg = config("model=llama", "model.n_layer=2", "model.lora.rank=4")
    hidden = hidden_matrices(build_chain(cfg.model, 100))
    assert len(hidden) == 2 * 2 * 7 and all(".lora_" in name for name in hidden)


@pytest.fixture
def gpt2(text):
    """A step of GPT-2 on words, its head tied to its embedding."""
    sizes = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.vocab_size=384"]
    length = ["train.epochs=null", "train.steps=1", "train.global_batch_size=4", "train.eval_every=null"]
    return [*sizes, *text, "data.vocabulary=words", *length]


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_a_plan_counts_the_tensors_that_the_optimizers_keep(ranks, gpt2, tmp_path, optim):
    words = [*gpt2, f"optim={optim}"]
    setup = prepare(config(*words, "parallel=single"))
    (planned,) = memory_of_ranks(setup.plan, setup.work[0], mean_states(setup.cfg.optim, setup.chain))
    ranks.run(1, run_on_rank, *for_rank(tmp_path, *words, "parallel=single"))
    (held,) = json.loads((tmp_path / "summary.json").read_text())["optimizer_bytes"]
    assert planned.optimizer == pytest.approx(held, rel=1e-3), "and a number of steps for each parameter of AdamW"


def test_a_pipeline_s_copies_of_a_tied_embedding_have_adamw_on_every_stage(ranks, gpt2, tmp_path):
    ranks.run(2, run_on_rank, *for_rank(tmp_path, *gpt2, "optim=muon", "parallel=pipelined"))
    state = saved(tmp_path, 1, "optimizer")
    assert {"embedding.wte.weight/exp_avg", "h.0.attn.c_attn.weight/momentum_buffer"} <= state.keys()
    manifest = json.loads((tmp_path / "checkpoints/latest/manifest.json").read_text())
    kinds = "torch.optim.Muon for the matrices of hidden layers and torch.optim.AdamW for the others"
    assert manifest["optimizer"] == kinds


MUON = {
    "as it comes": {},
    "without Nesterov's momentum": {"nesterov": False, "momentum": 0.8, "weight_decay": 0.2},
    "at AdamW's rates": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "eps": 1e-5},
}


@pytest.mark.parametrize("options", MUON.values(), ids=MUON)
def test_muon_orthogonalizes_in_single_precision_unless_the_run_has_less(toy, options):
    """A tall matrix, for three steps; torch's own Muon orthogonalizes in bfloat16."""
    words = ["optim=muon", "model.hidden=20", *(f"optim.{key}={value}" for key, value in options.items())]

    def trained(precision, own=False):
        strategy, optimizer = toy(*words, f"train.precision={precision}")
        weight = dict(strategy.named_parameters())["net1.weight"]
        of_torch = torch.optim.Muon([weight], lr=0.02, **options)
        draw = torch.Generator().manual_seed(3)
        for _ in range(3):
            weight.grad = torch.randn(weight.shape, generator=draw).to(weight)
            of_torch.step() if own else optimizer.step(0.02)
        return weight.detach().double()

    exact = trained("fp64")
    torch.testing.assert_close(trained("fp32"), exact, rtol=0, atol=1e-6)
    rounded = trained("fp32", own=True)
    assert torch.equal(trained("bf16"), rounded)
    assert 1e-5 < (rounded - exact).abs().max() < 2e-3


@pytest.mark.parametrize("typed", ["optim.weight_decay=0.3", "optim.others.weight_decay=0.3"])
def test_what_is_typed_acts_on_what_muon_does_not_take_too(toy, typed):
    before, after = step_without_gradient(*toy("optim=muon", typed, "optim.others.lr=0.01"), lr=0.02)
    decay = {"net1.weight": 0.02 * (0.3 if "others" not in typed else 0.1), "net2.weight": 0.01 * 0.3}
    for name, old in before.items():
        torch.testing.assert_close(after[name].detach(), old * (1 - decay.get(name, 0.0)))


@pytest.mark.parametrize("key, value", [("decay_vectors", "true"), ("rates", "{net1: 10}"), ("others", "null")])
def test_a_key_that_acts_on_both_optimizers_is_refused_in_that_of_the_others(key, value):
    with pytest.raises(TrainingError, match=f"optim.others.{key} has no effect: optim.{key} applies to both"):
        check_optimizer(to_dict(config("optim=muon", f"+optim.others.{key}={value}").optim))


def test_a_model_without_hidden_matrices_is_refused(toy):
    with pytest.raises(TrainingError, match=r"torch.optim.Muon is for .* this model trains none\. .* optim=adamw"):
        prepare(config("model=convnet", "optim=muon"))


def test_state_of_the_weights_dtype_follows_it_when_a_run_is_resumed_in_another_precision(tmp_path):
    adamw = ["optim=adamw", "train.epochs=null"]
    run(tmp_path, *adamw, "train.precision=fp32", "train.steps=2")
    run(tmp_path, *adamw, "train.precision=fp64", "train.steps=3", "train.resume=auto")
    assert {t.dtype for key, t in saved(tmp_path, 3, "optimizer").items() if "avg" in key} == {torch.float64}
    run(tmp_path, *adamw, "train.precision=fp32", "train.steps=4", "train.resume=auto")
    assert {t.dtype for key, t in saved(tmp_path, 4, "optimizer").items() if "avg" in key} == {torch.float32}


def test_a_rank_without_parameters_takes_part(ranks, tmp_path):
    """The toy model on three stages: the middle one is a ReLU."""
    words = ["optim=adamw", "train.epochs=null", "train.steps=6", "train.grad_clip=0.5", "parallel.chunks=4"]
    single, three = tmp_path / "single", tmp_path / "three"
    run(single, *words)
    summary, *others = ranks.run(3, run_on_rank, *for_rank(three, *words, "parallel=pipelined", "parallel.pp=3"))
    assert [stage["parameters"] for stage in summary["stages"]] == [110, 0, 55]
    assert others == [summary, summary]
    assert losses(three) == pytest.approx(losses(single), rel=1e-5)
    assert saved(three, 6).keys() == saved(single, 6).keys()


# -- schedules -------------------------------------------------------------------------------------------------------

LLM_C, FIFTH, LONG = CosineWarmup(10, 0.1), CosineWarmup(None, 0.0), CosineWarmup(100, 0.1)


@pytest.mark.parametrize(
    "schedule, total, per_epoch, factors",
    [
        # A tenth of the peak after one of ten steps of warm-up; the cosine begins at its top; a quarter of the way,
        # half, three quarters; 39/40, since its end is one step further; and it does not rise again.
        (LLM_C, 50, 7, {1: 0.1, 5: 0.5, 10: 1, 11: 1, 21: 0.8681980, 31: 0.55, 41: 0.2318020, 50: 0.10138715}),
        (LLM_C, 50, 7, {51: 0.1, 500: 0.1}),
        (FIFTH, 20, 1, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1, 13: 0.5}),  # a fifth of the run, where nothing is said
        (CosineWarmup(0, 0.1), 50, 1, {1: 1}),
        (CosineWarmup(None, 0.1), 1, 1, {1: 1}),
        (LONG, 10, 1, {10: 0.1}),  # a warm-up longer than the run is cut off
        (Step(every=2, unit="epoch", gamma=0.5), 100, 3, {1: 1, 6: 1, 7: 0.5, 12: 0.5, 13: 0.25}),
        (Step(every=3, unit="step", gamma=0.1), 100, 50, {1: 1, 3: 1, 4: 0.1, 6: 0.1, 7: 0.01}),
        (Constant(), 10, 1, {1: 1, 5: 1, 10: 1}),
        (Linear(2), 10, 1, {1: 0.5, 2: 1, 3: 1, 4: 7 / 8, 10: 1 / 8, 11: 0}),
        (Linear(None, 0.5), 10, 1, {1: 1, 2: 1, 3: 1 - 0.5 / 9}),
        (WSD(2, 4), 10, 1, {1: 0.5, 2: 1, 6: 1, 7: 1, 8: 0.8535534, 9: 0.5, 10: 0.1464466, 11: 0, 99: 0}),
        (WSD(2, 4, 0.2, "linear"), 10, 1, {1: 0.6, 2: 1, 7: 1, 8: 0.8, 10: 0.4, 11: 0.2}),
        (WSD(0, 4, 0, "1-sqrt"), 10, 1, {1: 1, 7: 1, 8: 0.5, 10: 1 - 0.75**0.5}),
        (WSD(None, None, 0, "linear", 0.5, 0.5), 3, 1, {1: 0.5, 2: 1, 3: 1}),  # two steps, and the one that is left
        (WSD(None, None), 1, 1, {1: 1}),
    ],
)
def test_schedules_by_numbers_worked_out_by_hand(schedule, total, per_epoch, factors):
    found = {step: schedule.factor(step, total=total, per_epoch=per_epoch) for step in factors}
    assert found == pytest.approx(factors, rel=1e-6)


@pytest.mark.parametrize("warmup, decay, total", [(0, 0, 7), (5, 8, 20), (1, 19, 20), (30, 20, 100)])
def test_the_rates_are_those_of_transformers_and_in_the_warm_up_those_of_its_next_step(warmup, decay, total):
    transformers = pytest.importorskip("transformers")

    def theirs(schedule, *args, **how):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule, rates = schedule(optimizer, *args, **how), []
        for _ in range(total):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return rates[1 : warmup + 1] + rates[warmup:]

    def ours(schedule):
        return [schedule.factor(step, total, 1) for step in range(1, total + 1)]

    assert ours(Linear(warmup)) == pytest.approx(
        theirs(transformers.get_linear_schedule_with_warmup, warmup, total), abs=1e-12
    )
    for kind in ("cosine", "linear", "1-sqrt"):
        how = {"num_training_steps": total, "decay_type": kind, "min_lr_ratio": 0.1}
        expected = theirs(transformers.get_wsd_schedule, warmup, decay, **how)
        assert ours(WSD(warmup, decay, 0.1, kind)) == pytest.approx(expected, abs=1e-12)
