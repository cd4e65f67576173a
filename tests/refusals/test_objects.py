"""Objects of a program that are of a wrong kind, shape or number: one error that says how they are written."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from composed import config
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

from common.errors import UserError
from conf.instantiate import to_config, to_dict
from data.dataset import DataSet, InMemory, Source
from data.tensors import TensorData
from models.chain import Chain, LayerSpec
from models.given import set_given
from models.losses import ClassCrossEntropy, Several, SquaredError, Sums, gather
from models.sequential import chain_of
from training import load_config, train
from training.command.api import with_given
from training.run.prepare import prepare

WORDS = ["train.epochs=null", "train.steps=2", "train.global_batch_size=8", "logger=none", "device=cpu"]
INPUTS = torch.randn(40, 4)
LABELS = (INPUTS.sum(dim=1) > 0).long()
WRITE_TENSORS = r"data.tensors.TensorData\(inputs, targets\)"


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def chain(loss=None, layers=None):
    return chain_of(layers or net(), loss or ClassCrossEntropy())


def tied(names, second=None):
    """Three layers whose weights have the same shape."""
    linear = partial(nn.Linear, 4, 4)
    builds = linear, second or linear, linear
    return Chain([LayerSpec(str(i), build) for i, build in enumerate(builds)], ClassCrossEntropy(), tied=names)


def data(inputs=INPUTS, targets=LABELS, **options):
    return TensorData(inputs, targets, **options)


@pytest.fixture(scope="module")
def cfg():
    return config("train.global_batch_size=8", "train.steps=1", "train.epochs=null", "train.precision=fp32")


class Loss:
    """Gives what a function of output and targets gives."""

    metrics = ()

    def __init__(self, give, metrics=()):
        self.give, self.metrics = give, metrics

    def __call__(self, output, targets, weights):
        return self.give(output, targets)


class Miscounted(Loss):
    """Its method does not count as its sums do."""

    def count(self, targets):
        return len(targets) // 2


class Given(DataSet):
    """Leaves what it was given."""

    def __init__(self, **splits):
        super().__init__()
        self.given = splits

    def prepare(self):
        for name, split in self.given.items():
            setattr(self, name, split)


class Lightning(nn.Module):
    """With a method that training would take for a head's own loss."""

    def loss(self, batch):
        return self(batch[0]).sum()


class Head(nn.Linear):
    """Computes the loss itself, without the accuracy of ClassCrossEntropy."""

    def loss(self, x, targets, weights):
        return Sums(summed(self(x), targets), torch.tensor(len(targets)))


class Mean(nn.Linear):
    """Computes the loss itself, as a mean."""

    def loss(self, x, targets, weights):
        return F.cross_entropy(self(x), targets)


class Detached(nn.Linear):
    """Computes the loss itself, without a gradient."""

    def loss(self, x, targets, weights):
        return Sums(summed(self(x), targets).detach(), torch.tensor(len(targets)), (torch.tensor(0),))


class Late(nn.Linear):
    """Makes a buffer in its first forward."""

    def forward(self, x):
        if not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones_like(x[0]))
        return super().forward(x * self.ones)


class Compiled(nn.Module):
    """As torch.compile makes them."""

    def __init__(self):
        super().__init__()
        self._orig_mod = net()


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def lock():
    layer = nn.Linear(4, 2)
    layer.lock = __import__("threading").Lock()
    return layer


def frozen():
    return net().requires_grad_(False)


def on_meta():
    with torch.device("meta"):
        return net()


def spec(*names, **fields):
    return Chain([LayerSpec(name, nn.ReLU) for name in names or ("a",)], ClassCrossEntropy(), **fields)


class Reads(Source):
    """Gives for one index what it was given."""

    def __init__(self, given):
        self.given = given

    def __len__(self):
        return 40

    def read(self, indices, epoch):
        return self.given


def source(*given):
    return Given(train=Reads(given[0] if len(given) == 1 else given), valid=None, test=None, description="x")


def with_foo():
    config = load_config("model.lora.rank=2")
    OmegaConf.update(config, "model.lora.foo", 1, force_add=True)
    return config


# What is refused when it is made or handed over: no configuration is composed.
AT_ONCE = {
    "another loss of torch": (lambda: chain(nn.NLLLoss()), r"NLLLoss is not a loss.*CrossEntropyLoss\(\).*'A loss'"),
    "a sum": (lambda: chain(nn.MSELoss(reduction="sum")), r'MSELoss\(reduction="sum"\).*mean over the global batch'),
    "weighed places": (lambda: chain(nn.BCEWithLogitsLoss(INPUTS)), "weighs the places of a batch.*pos_weight="),
    "a loss that is a function": (lambda: chain(F.cross_entropy), r"cross_entropy is not a loss.*CrossEntropyLoss\(\)"),
    "a list of layers": (lambda: chain(layers=[nn.Linear(4, 2)]), r"not a list.*Write nn.Sequential\(\*layers\)"),
    "a method called loss": (lambda: chain(layers=Lightning()), "Lightning.loss would be called.*rename this method"),
    "no layers": (lambda: chain_of(nn.Sequential(), ClassCrossEntropy()), "at least one layer"),
    "a wrapped model": (lambda: chain(layers=nn.DataParallel(net())), "not a DataParallel"),
    "a compiled model": (lambda: chain(layers=Compiled()), "not a Compiled.*train.compile=true"),
    "a model without memory": (lambda: chain(layers=on_meta()), "cannot be copied.*meta tensor"),
    "a lazy model": (lambda: chain(layers=nn.Sequential(nn.LazyLinear(2))), "lazy: call the model once"),
    "a layer that cannot be copied": (lambda: chain(layers=nn.Sequential(lock())), "cannot be copied"),
    "a chain of modules": (lambda: Chain(net(), ClassCrossEntropy()), "LayerSpec.*not of a Sequential"),
    "a layer in a layer": (lambda: spec("a", "a.b"), "layer 'a.b' would be a part of layer 'a'"),
    "no list of layers": (lambda: Chain(None, ClassCrossEntropy()), "list of LayerSpec.*not of a NoneType"),
    "a number as name": (lambda: spec(3), "layer 3: a name is a text"),
    "a name of modules": (lambda: spec("forward"), "layer 'forward' has the name of an attribute"),
    "a word as metrics": (lambda: chain(Loss(summed, "accuracy")), "Loss.metrics='accuracy' must be names"),
    "a metric called loss": (lambda: chain(Loss(summed, ("loss",))), "has the name 'loss'"),
    "metrics called as others of a step": (lambda: chain(Loss(summed, ("step", "lr"))), "has the name 'lr', 'step'"),
    "targets beyond the vocabulary": (
        lambda: data(LABELS[:, None], LABELS[:, None] + 3, vocab_size=3),
        "the targets hold tokens from 3 to 4",
    ),
    "an option of another model": (lambda: train("model.hidden=3", model=chain()), "'model.hidden=3' has no effect"),
    "a layer that is built": (lambda: LayerSpec("a", nn.Linear(4, 2)), "build=Linear must be a function"),
    "strings": (lambda: data(["a"] * 40), "inputs: list is not a tensor"),
    "float8": (lambda: data(INPUTS.to(torch.float8_e4m3fn)), "float8_e4m3fn cannot be trained on"),
    "a sparse tensor": (lambda: data(INPUTS.to_sparse()), "sparse"),
    "a list of inputs": (lambda: data([INPUTS, INPUTS]), "a tuple of them for a model with several inputs"),
    "no targets": (lambda: data(INPUTS, None), "targets: NoneType is not a tensor"),
    "no target at all": (lambda: data(INPUTS, ()), "inputs or targets are an empty tuple"),
    "fewer of a second target": (lambda: data(INPUTS, (LABELS, INPUTS[:9])), "40 inputs and 40 and 9 targets"),
    "two metrics of one name": (
        lambda: chain(Several([Miscounted(torch.sum, ("count",))])),
        "two metrics of these .* named target_1_count",
    ),
    "a factor for no loss": (lambda: chain(Several([SquaredError()], [1, 2])), "no loss target_2, only target_1"),
    "a loss among several without count": (
        lambda: chain([ClassCrossEntropy(), Loss(summed)]),
        r"Loss is one of several.*a method count\(targets\)",
    ),
    "fewer targets": (lambda: data(INPUTS, LABELS[:20]), "40 inputs and 20 targets"),
    "tokens without length": (lambda: data(LABELS, vocab_size=4), r"tokens, whole numbers \[n, t\]"),
    "tokens beyond the vocabulary": (lambda: data(LABELS[:, None] + 5, vocab_size=4), "from 5 to 6, but vocab_size=4"),
    "the model itself": (lambda: train(model=net(), data=data()), r"train\(model=net, loss=torch.nn.Cross"),
    "a loss without a model": (lambda: train("model=toy", loss=nn.MSELoss()), "'model.loss={_target_: ...}'"),
    "a name as model": (lambda: train(model="gpt2"), "str is not a model.*model=NAME"),
    "a model as a word": (lambda: train(net(), data()), "a Sequential is not a word of the command line"),
    "two models": (lambda: train("model=gpt2", model=chain()), "model is given twice: by 'model=gpt2'"),
    "one tensor": (lambda: train(model=chain(), data=INPUTS), f"Tensor is not a data set.*{WRITE_TENSORS}"),
    "a Dataset of torch": (lambda: train(data=torch.utils.data.TensorDataset(INPUTS, LABELS)), WRITE_TENSORS),
    "targets of no adapters": (lambda: train("model.lora.targets=[0]", model=chain()), "without model.lora.rank"),
    "a tokenizer for tensors": (
        lambda: train("model=llama", "+model.tokenizer=x", data=data()),
        "model.tokenizer has no effect",
    ),
    "a key of no section": (lambda: load_config("+train.foo=1"), "no key train.foo"),
    "a key that a program adds": (lambda: train(config=with_foo()), "no key model.lora.foo"),
    "a dict as configuration": (lambda: train(config={"train": {"steps": 4}}), "result of load_config, not a dict"),
}

# What is refused before a process starts: the model, the data.
BEFORE_THE_RUN = {
    "a loss that is a vector": (chain(Loss(lambda o, t: o[:, 0])), data(), "returned Tensor; return models.losses"),
    "a sum that is a vector": (chain(Loss(lambda o, t: Sums(o[:, 0], o.sum()))), data(), r"of shape \(8,\) as its"),
    "a count that is an int": (chain(Loss(lambda o, t: Sums(summed(o, t), 8))), data(), "returned int as its count"),
    "metrics without sums": (chain(Loss(lambda o, t: Sums(o.sum(), o.sum()), ("a",))), data(), r"1 metrics \(a\)"),
    "a layer's loss with other metrics": (
        chain(layers=nn.Sequential(nn.Linear(4, 8), Head(8, 2))), data(), r"'1' \(Head\).* 0 metrics, and .* names 1",
    ),
    "a layer's loss that is a mean": (
        chain(layers=nn.Sequential(nn.Linear(4, 8), Mean(8, 2))), data(), "the loss Mean.loss returned Tensor; return",
    ),
    "a buffer that a forward makes": (
        chain(layers=nn.Sequential(nn.Linear(4, 8), Late(8, 2))), data(), r"'1' \(Late\): its forward makes 'ones'",
    ),
    "a layer's loss that is detached": (
        chain(layers=nn.Sequential(nn.Linear(4, 8), Detached(8, 2))), data(), "Detached.loss is not differentiable",
    ),
    "a detached loss": (chain(Loss(lambda o, t: Sums(o.sum().detach(), o.sum()))), data(), "differentiable"),
    "a mean by weights of the model": (
        chain(Loss(lambda o, t: Sums((o[:, 0] * o[:, 1].exp()).sum(), o[:, 1].exp().sum()))), data(),
        r"count of the loss Loss is differentiable.*count.detach\(\)",
    ),
    "everything frozen": (chain(layers=frozen()), data(), "no parameters to train: all 58 are frozen"),
    "nothing to train": (chain(layers=nn.Sequential(nn.ReLU())), data(), "its layers have none"),
    "a layer of a list": (
        Chain([LayerSpec("a", lambda: [1])], ClassCrossEntropy()), data(), "layer 'a'.*returned a list",
    ),
    "a tie to nothing": (
        Chain([LayerSpec("a", partial(nn.Linear, 4, 2))], ClassCrossEntropy(), tied={"a.weight": "b.weight"}),
        data(), "ties b.weight, which is no parameter",
    ),
    "a tie to what is tied": (
        tied({"0.weight": "1.weight", "1.weight": "2.weight"}), data(),
        "ties 0.weight to 1.weight, which is tied itself; tie both to 2.weight",
    ),
    "a tie of one of two names": (
        tied({"2.weight": "1.0.weight"}, lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2)), data(),
        "1.1.weight and 1.0.weight are one parameter of layer '1'",
    ),
    "labels beyond the classes": (chain(), data(targets=LABELS + 1), "int64 .* from 1 to 2.*Target 2 is out of bounds"),
    "one label beyond in the test split": (
        chain(), Given(train=InMemory(INPUTS, LABELS), valid=None, test=InMemory(INPUTS, LABELS + 7), description="x"),
        "from 7 to 8",
    ),
    "labels that are floats": (chain(), data(targets=LABELS.float()), r"float32 \(loss .*targets.long\(\)"),
    "labels in a column": (chain(), data(targets=LABELS[:, None]), r"\(1,\) int64 .*give targets\[:, 0\]"),
    "labels as vectors": (chain(), data(targets=F.one_hot(LABELS).float()), r"targets.argmax\(dim=1\)"),
    "all labels ignored": (chain(), data(targets=torch.full_like(LABELS, -100)), "no target counts: all 32 samples"),
    "two targets for a loss": (
        chain(), data(targets=(LABELS, INPUTS)), "each sample has 2 targets, and the loss ClassCrossEntropy takes one",
    ),
    "losses for another number of targets": (
        chain([ClassCrossEntropy()] * 3), data(targets=(LABELS, LABELS)), "3 losses for 3 outputs .* and 2 targets",
    ),
    "one of two targets beyond the classes": (
        chain([ClassCrossEntropy()] * 2), data(targets=(LABELS, LABELS + 1)), "int64 .* from 1 to 2.*out of bounds",
    ),
    "a count that is another one": (
        chain([ClassCrossEntropy(), Miscounted(lambda o, t: Sums(summed(o, t), torch.tensor(len(t))))]),
        data(targets=(LABELS, LABELS)), "count.. returns 4 for.*counts 8",
    ),
    "targets of another shape": (chain(SquaredError()), data(targets=INPUTS[:, 0]), r"\(8, 2\), the targets are"),
    "whole numbers": (chain(), data(LABELS[:, None].expand(40, 4)), r"'0' \(Linear\).*int64: give inputs.float\(\)"),
    "truth values": (chain(), data(INPUTS > 0), "gets bool"),
    "tokens beyond the embedding": (
        chain(layers=nn.Sequential(nn.Embedding(10, 2), nn.Flatten())), data(LABELS[:, None] * 12),
        "embeds 0 to 9 and gets whole numbers from 0 to 12",
    ),
    "numbers for tokens": (chain(layers=nn.Sequential(nn.Embedding(10, 2), nn.Flatten())), data(), "'0' .Embedding"),
    "two inputs for one": (chain(), data((INPUTS, INPUTS)), "takes 2 positional arguments but 3"),
    "a split that is a generator": (chain(), Given(train=(x for x in INPUTS)), "left train=<generator"),
    "no split": (chain(), Given(), "left no train;"),
    "a source of inputs": (chain(), source(INPUTS[:1]), r"Reads.read\(\) returned a tensor \[1, 4\] for one index"),
    "a source of dicts": (chain(), source({"x": INPUTS[:1]}), "returned a dict"),
    "a source of arrays": (chain(), source(INPUTS[:1].numpy(), LABELS[:1].numpy()), "returned a ndarray, a ndarray"),
    "a source without rows": (chain(), source(INPUTS[0], LABELS[0]), r"\[4\], a tensor \[\] for one index"),
    "no description": (
        chain(), Given(train=InMemory(INPUTS, LABELS), valid=None, test=None), "left no description",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_is_of_a_wrong_kind_is_refused_at_once(name):
    misuse, message = AT_ONCE[name]
    with pytest.raises(UserError, match=f"(?s){message}"):
        misuse()


def assert_refused(cfg, model, samples, message):
    objects = {"model": model, "data": copy.copy(samples)}
    set_given(objects)
    try:
        with pytest.raises(UserError, match=f"(?s){message}"):
            prepare(to_config(to_dict(with_given(cfg, objects))))
    finally:
        set_given({})


def test_a_loss_that_gathers_is_refused_before_the_run_where_micro_batches_divide_the_samples(cfg):
    tree, gathers = to_dict(cfg), Loss(lambda o, t: Sums(summed(gather(o), gather(t)), torch.tensor(len(gather(o)))))
    tree["parallel"]["chunks"] = 2
    says = r"gather\(\) compares all samples.*chunks=2.*set parallel.chunks=1"
    assert_refused(to_config(tree), chain(gathers), data(), says)


@pytest.mark.parametrize("name", BEFORE_THE_RUN)
def test_what_does_not_fit_together_is_refused_before_the_run(name, cfg):
    assert_refused(cfg, *BEFORE_THE_RUN[name])


def test_no_experiment_is_the_default_and_foreach_takes_the_place_of_fused(tmp_path):
    words = ["experiment=null", "debug=null", "optim.foreach=true"]
    assert train(*WORDS, *words, f"hydra.run.dir={tmp_path}").summary["steps"] == 2


def test_arrays_and_a_pair_are_data_and_whole_numbers_are_classes(tmp_path):
    torch.manual_seed(0)
    model, losses = chain(), []
    for place, samples in enumerate([data(), (INPUTS.numpy(), LABELS.numpy().astype(np.uint8))]):
        result = train(*WORDS, f"hydra.run.dir={tmp_path}/{place}", model=model, data=samples)
        losses.append([record["loss"] for record in result.metrics if "loss" in record])
    assert losses[0] == losses[1]
