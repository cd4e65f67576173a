"""Training from a Python program: the command line's words, a configuration, and models and data of one's own."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from common.errors import CheckpointError, UserError
from data.tensors import TensorData
from data.text import Text
from models.chain import Chain, LayerSpec
from models.losses import ClassCrossEntropy, TokenCrossEntropy
from models.sequential import chain_of
from training import load_config, train, verify

QUICK = ["train.epochs=null", "train.steps=4", "logger=none", "device=cpu", "parallel.threads=1"]
PARALLEL = ["parallel=pipe_ddp", "parallel.dp=2", "parallel.chunks=2"]


class Squeeze(nn.Module):
    """A layer of this file, which no worker can import."""

    def forward(self, x):
        return x.flatten(1).tanh()


@pytest.fixture
def own():
    """A network and samples whose class is the sign of their sum."""
    torch.manual_seed(3)
    inputs = torch.randn(400, 2, 4)
    data = TensorData(inputs, (inputs.sum(dim=(1, 2)) > 0).long())
    return nn.Sequential(Squeeze(), weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 2)), data


def test_the_words_of_the_command_line_give_a_summary_and_a_directory(tmp_path, capsys):
    result = train(*QUICK, f"hydra.run.dir={tmp_path}/run")
    said = capsys.readouterr().out
    assert f'training.train("mode=eval", "checkpoint={tmp_path}/run"' in said and "train.py" not in said
    assert result.summary["steps"] == 4 and result.summary["model"] == "toy"
    assert result.run_dir == tmp_path / "run" and (result.run_dir / ".hydra" / "config.yaml").exists()
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert losses[-1] == result.summary["final_loss"] and len(losses) == 4
    assert set(result.state_dict()) == {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}


def test_the_layouts_to_copy_are_calls_with_the_words_and_names_of_what_was_given(tmp_path, own, capsys):
    net, data = own
    words = ["mode=plan", "cluster=h200x8", "parallel=auto", "optim.lr=0.5", f"hydra.run.dir={tmp_path}/run"]
    train(*words, model=net, loss=nn.CrossEntropyLoss(), data=data)
    said = capsys.readouterr().out
    assert 'training.train("optim.lr=0.5", "parallel=ddp", "parallel.dp=8", ' in said and "train.py" not in said
    assert ", model=..., data=...)" in said


def test_a_configuration_is_composed_changed_and_run(tmp_path):
    cfg = load_config(*QUICK, "model=convnet", "data.image_size=8", "model.image_size=8")
    assert (cfg.model.name, cfg.train.steps) == ("convnet", 4)
    cfg.train.steps = 2
    result = train(f"hydra.run.dir={tmp_path}/run", config=cfg)
    assert (result.summary["steps"], result.summary["model"]) == (2, "convnet")
    assert "steps: 2" in (result.run_dir / ".hydra" / "config.yaml").read_text()


def test_a_network_of_ones_own_starts_from_its_weights_and_is_trained_alike_everywhere(tmp_path, own):
    """In this process, and in four that cannot import what it is made of."""
    net, data = own
    losses, results = {}, {}
    for name, layout in {"single": ["parallel.chunks=4"], "pipe_ddp": PARALLEL}.items():
        chain = chain_of(net, ClassCrossEntropy())
        result = train(*QUICK, *layout, "optim.lr=0.5", f"hydra.run.dir={tmp_path}/{name}", model=chain, data=data)
        losses[name] = [record["loss"] for record in result.metrics if "loss" in record]
        results[name] = result
    batch, targets = data.train.inputs, data.train.targets
    before = nn.functional.cross_entropy(net(batch), targets).item()
    assert losses["single"][0] == pytest.approx(before, abs=0.1), "the weights that it came with"
    assert losses["pipe_ddp"] == pytest.approx(losses["single"], rel=1e-6)
    net.load_state_dict(results["pipe_ddp"].state_dict())
    assert nn.functional.cross_entropy(net(batch), targets).item() < before - 0.02


def test_a_model_may_have_several_inputs(tmp_path):
    left, right = torch.randn(200, 4), torch.randn(200, 4)
    layers = [LayerSpec("both", lambda: nn.Bilinear(4, 4, 8)), LayerSpec("last", lambda: nn.Linear(8, 2))]
    data = TensorData((left, right), ((left * right).sum(dim=1) > 0).long())
    chain = Chain(layers, loss=ClassCrossEntropy())
    words = [*QUICK, "parallel=pipelined", "parallel.chunks=2", "optim.lr=1", "train.steps=20"]
    result = train(*words, f"hydra.run.dir={tmp_path}", model=chain, data=data)
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]


def test_texts_may_be_given_to_a_language_model_of_ones_own(tmp_path, capfd):
    (tmp_path / "text.txt").write_text("the cat and the dog saw the bird and the bird saw the cat\n" * 200)
    layers = [LayerSpec("words", partial(nn.Embedding, 64, 8)), LayerSpec("head", partial(nn.Linear, 8, 64))]
    chain, losses = Chain(layers, loss=TokenCrossEntropy(), limits={"vocabulary": 64}), []
    for name in ("single", "ddp"):
        data = Text(f"{tmp_path}/text.txt", cache_dir=f"{tmp_path}/cache", vocabulary="words", seq_len=16)
        words = [f"parallel={name}", "train.global_batch_size=8", f"hydra.run.dir={tmp_path}/{name}"]
        result = train(*QUICK, *words, "train.precision=fp64", model=chain, data=data)
        losses.append([record["loss"] for record in result.metrics if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert "no sample" not in capfd.readouterr().err


def test_what_is_given_is_forgotten_after_the_run_and_evaluated_when_given_again(tmp_path, own):
    net, data = own
    chain = chain_of(net, ClassCrossEntropy())
    run = train(*QUICK, f"hydra.run.dir={tmp_path}/run", model=chain, data=data)
    again = [*QUICK, "mode=eval", f"checkpoint={run.run_dir}"]
    result = train(*again, f"hydra.run.dir={tmp_path}/eval", model=chain, data=data)
    assert result.summary["test_loss"] == pytest.approx(run.summary["test_loss"], rel=1e-6)
    cfg = load_config(*again)
    cfg.model = {"_target_": "models.given.given", "key": "model", "name": "given", "init_from": None}
    with pytest.raises(UserError, match="give it again"):
        train(f"hydra.run.dir={tmp_path}/without", config=cfg)


MISTAKES = [
    (["optim.lrr=1"], "did you mean optim.lr"),
    (["parallel=ddp", "parallel.dp=3"], "cannot be cut into dp=3"),
    (["model=gpt3"], "there is no 'model/gpt3'"),
    (["-m", "seed=1,2"], "once for each value"),
]


@pytest.mark.parametrize("words, message", MISTAKES)
def test_a_mistake_is_an_exception_with_the_message_of_the_command_line(words, message, tmp_path, capsys):
    with pytest.raises(UserError, match=message):
        train(*words, f"hydra.run.dir={tmp_path}/run")
    assert "Error executing job" not in capsys.readouterr().err


@pytest.mark.parametrize("resume", ["auto", "{}/run", "{}/run/checkpoints/latest"])
def test_a_configuration_resumes_a_run_in_its_directory(tmp_path, resume):
    here = f"hydra.run.dir={tmp_path}/run"
    train(*QUICK, here)
    cfg = load_config(*QUICK, here, f"train.resume={resume.format(tmp_path)}")
    cfg.train.steps += 2
    assert train(here, config=cfg).summary["steps"] == cfg.train.steps


def test_a_directory_that_holds_a_run_is_an_exception_too(tmp_path):
    result = train(*QUICK, "train.checkpoint_every=null", f"hydra.run.dir={tmp_path}/run")
    with pytest.raises(UserError, match="holds another run; .* no checkpoint, replace it by a run from step 1"):
        train(*QUICK, f"hydra.run.dir={tmp_path}/run")
    with pytest.raises(CheckpointError):
        result.state_dict()


def test_the_tokens_per_second_of_a_run_are_those_of_its_steps_which_count_no_padding(tmp_path):
    tokens = torch.randint(5, (40, 8), generator=torch.Generator().manual_seed(0))
    data = TensorData(tokens, tokens.where(torch.arange(8) < 2, -100), vocab_size=5)
    layers = [LayerSpec("words", partial(nn.Embedding, 5, 4)), LayerSpec("head", partial(nn.Linear, 4, 5))]
    chain = Chain(layers, loss=TokenCrossEntropy(), limits={"vocabulary": 5})
    words = [*QUICK, "train.global_batch_size=4", "train.eval_every=null", "sample.tokens=0"]
    result = train(*words, f"hydra.run.dir={tmp_path}/run", model=chain, data=data)
    assert [r["tokens_per_s"] * r["step_time_s"] for r in result.metrics] == pytest.approx([8] * 4)
    assert result.summary["tokens_per_s"] * result.summary["step_time_s"] == pytest.approx(8)


class Annealed(ClassCrossEntropy):
    """Counts its calls."""

    calls, weights = 0, torch.ones(2)

    def __init__(self):
        self.seen = torch.zeros(2)

    def __call__(self, output, targets, weights):
        self.calls += weights is None
        self.seen = output.detach()
        sums = super().__call__(output, targets, weights)
        return sums._replace(loss=self.calls * sums.loss)


def test_a_loss_is_not_called_before_the_first_step_and_is_left_as_it_was(tmp_path, own):
    (net, data), loss = own, Annealed()
    runs = [QUICK, QUICK, [*QUICK, "parallel=pipelined"]]
    first, again, cut = (
        train(*words, f"hydra.run.dir={tmp_path}/{i}", model=net, loss=loss, data=data) for i, words in enumerate(runs)
    )
    plain = train(*QUICK, f"hydra.run.dir={tmp_path}/plain", model=net, loss=ClassCrossEntropy(), data=data)
    assert first.summary["first_loss"] == again.summary["first_loss"] == plain.summary["first_loss"]
    assert cut.summary["steps"] == 4 and loss.calls == 0


def state_of_the_process():
    """What a program may have set, by name."""
    back, seen = torch.backends, {}
    for place in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "cuda", "mkldnn"):
        item = back
        for part in place.split("."):
            item = getattr(item, part)
        for name in ("allow_tf32", "benchmark", "deterministic", "enabled", "fp32_precision"):
            if hasattr(type(item), name) or hasattr(item, name):
                seen[place, name] = getattr(item, name)
    root = logging.getLogger()
    return {
        **seen, "precision": torch.get_float32_matmul_precision(), "debug": torch.get_deterministic_debug_mode(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()), "dtype": torch.get_default_dtype(),
        "grad": (torch.is_grad_enabled(), torch.is_anomaly_enabled()), "drawn": torch.get_rng_state().tolist(),
        "python": random.getstate(), "logging": (root.level, [*root.handlers], logging.getLogger("mine").level),
        "warnings": ([*warnings.filters], warnings.showwarning), "variables": dict(os.environ), "folder": os.getcwd(),
        "path": [*sys.path], "words": [*sys.argv], "start": multiprocessing.get_start_method(allow_none=True),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    }  # fmt: skip


class Fails(nn.Linear):
    """Fails in a run, and not in the checks before it, whose tensors require no gradient at the end."""

    def forward(self, x):
        return _Fails.apply(super().forward(x))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise FloatingPointError("in a backward")


FAILS = Fails(10, 5)  # here, as its weights are drawn


def failing(*words):
    with pytest.raises(FloatingPointError):
        train(*words, *SETS, model=FAILS, loss=nn.MSELoss(), data=(torch.zeros(100, 10), torch.zeros(100, 5)))


SETS = ["train.deterministic=true", "parallel.env={MINE: b, NEW: c}"]
CALLS = {
    "a run": lambda *words: train(*words, *SETS, "train.tf32=true", "train.detect_anomaly=true"),
    "a run without TF32": partial(train, "train.cudnn_benchmark=true"),
    "a run that fails": failing,
    "a plan": lambda *words: train(*words, *SETS, "mode=plan", "parallel=ddp"),
    "words that are wrong": lambda *words: pytest.raises(UserError, train, *words, "optim.lr=abc"),
    "a configuration": lambda *words: load_config("model=convnet"),
    "a verification": lambda *words: verify(*words[2:], "verify.steps=1", "parallel=ddp", "model=toy"),
    "an evaluation": lambda *words: train(*words, "mode=eval", f"checkpoint={train(*QUICK).run_dir}"),
}


@pytest.fixture
def set_otherwise(tmp_path, monkeypatch):
    """Settings that no run has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "a")
    file = logging.FileHandler(tmp_path / "log.txt", mode="w")
    logging.getLogger().addHandler(file)
    logging.getLogger("mine").setLevel(logging.DEBUG)
    torch.set_num_threads(2)
    torch.set_deterministic_debug_mode(1)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield tmp_path / "log.txt"
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.set_deterministic_debug_mode(0)
    torch.set_num_threads(1)
    logging.getLogger().removeHandler(file)


@pytest.mark.parametrize("name", CALLS)
def test_a_run_leaves_the_process_as_it_was(name, set_otherwise, tmp_path):
    train(*QUICK, "train.steps=1")  # imports what sets something at its import
    before = state_of_the_process()
    CALLS[name](*QUICK[:3], "device=cpu", f"hydra.run.dir={tmp_path}/run")
    after = state_of_the_process()
    assert {key: (value, after[key]) for key, value in before.items() if after[key] != value} == {}
    logging.getLogger().error("goes on")
    assert set_otherwise.read_text() == "goes on\n"
