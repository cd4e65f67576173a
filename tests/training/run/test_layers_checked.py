"""What a layer does that depends on the layout is noticed before a run starts, and by its name."""

import copy
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from common.errors import ModelError, PlanError, TrainingError, UserError
from data.dataset import Batch
from data.tensors import TensorData
from models.batchnorm import BatchNorm1d
from models.chain import Chain, LayerSpec
from models.losses import ClassCrossEntropy
from models.sequential import chain_of
from parallel.layout import Layout
from parallel.shape_inference import trace
from planner.counting import Measure
from training import train
from training.run.checks.layers import check_examined
from training.run.setup import Setup

SINGLE = {"strategy": "single", "dp": 1, "chunks": 1, "pipelined": False, "devices": (), "pp": 1, "parameters": 1}
SINGLE |= {"shards": 1, "stages": [1], "device_type": "cpu"}
NO_DATA = SimpleNamespace(train=None, valid=None, test=None)


class Own(nn.Module):
    """A layer that does ``forward(self, x)`` and has a buffer of 8 numbers."""

    def __init__(self, forward, persistent=True):
        super().__init__()
        self.register_buffer("kept", torch.zeros(8), persistent=persistent)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def average(self, x):
    self.kept.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.kept


def overwritten(self, x):
    self.kept.copy_(x.detach().mean(0))
    return x


def cached(self, x):
    if not hasattr(self, "cache"):
        self.register_buffer("cache", torch.ones(8, device=x.device), persistent=False)
    return x * self.cache + self.kept


def functional(self, x):
    return nn.functional.batch_norm(x, self.kept, self.kept, training=self.training)


def item(self, x):
    return x / x.detach().abs().max().item()


def as_array(self, x):
    return x * float(x.detach().numpy().max())


def by_mask(self, x):
    return x + x[x > 0].sum()


def by_index(self, x):
    return x[:, [7, 6, 5, 4, 3, 2, 1, 0]]


def elsewhere(self, x):
    return x + torch.ones(8)


class GivenSample(Setup):
    """The objects of a run, with a micro-batch that no data set has."""

    sample = None

    def some(self, count):
        return self.sample


def setup_of(layer, *, mode="train", compile=False, activation_checkpointing=False, **plan):
    layers = [LayerSpec("first", partial(nn.Linear, 8, 8)), LayerSpec("h.0", layer), LayerSpec("last", nn.Flatten)]
    sample = Batch(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    train = SimpleNamespace(compile=compile)
    cfg = SimpleNamespace(mode=mode, train=train, model=SimpleNamespace(name="own"))
    plan = SimpleNamespace(**{**asdict(Layout()), **SINGLE, "recompute": activation_checkpointing, **plan})
    chain = Chain(layers, ClassCrossEntropy())
    setup = GivenSample(cfg, chain, NO_DATA, plan)
    setup.sample = sample
    return setup


def setup_of_net(net):
    """The objects of a run in one process."""
    chain, setup = chain_of(net, ClassCrossEntropy()), setup_of(nn.Identity)
    made = GivenSample(setup.cfg, chain, NO_DATA, setup.plan)
    made.sample = setup.sample
    return made


CHANGED = {
    "BatchNorm": (partial(nn.BatchNorm1d, 8), "running_mean"),
    "spectral norm": (lambda: spectral_norm(nn.Linear(8, 8)), "parametrizations.weight.0._u"),
    "an average": (partial(Own, average), "kept"),
    "an average that is not saved": (partial(Own, average, persistent=False), "kept"),
    "functional": (partial(Own, functional), "kept"),
    "given in evaluation mode": (lambda: nn.BatchNorm1d(8).eval(), "running_mean"),
}
KEPT = {
    "this project's BatchNorm": partial(BatchNorm1d, 8),
    "no running statistics": partial(nn.BatchNorm1d, 8, track_running_stats=False),
    "scratch memory": partial(Own, overwritten, persistent=False),
    "a cache": partial(Own, cached),
}


@pytest.mark.parametrize("layer, tensor", CHANGED.values(), ids=CHANGED)
def test_a_layer_that_changes_its_tensors_is_refused_where_the_batch_is_cut(layer, tensor):
    for changes, words in [
        ({"dp": 2, "strategy": "ddp"}, "parallel.dp=2"),
        ({"chunks": 4}, "parallel.chunks=4"),
        ({"activation_checkpointing": True}, "train.activation_checkpointing=true"),
    ]:
        with pytest.raises(PlanError, match=f"'h.0' .* changes its '{tensor}' .* with {words} .*models.batchnorm"):
            check_examined(setup_of(layer, **changes))
    check_examined(setup_of(layer))
    check_examined(setup_of(layer, mode="eval", dp=2))


def test_a_changing_tensor_that_two_layers_have_is_refused_because_each_would_change_a_copy():
    mean, linear, alike = Own(average), nn.Linear(8, 8), Own(lambda self, x: x + self.kept)
    shares = Own(average)
    shares.kept = mean.kept
    for layers in ([mean, linear, mean], [nn.Sequential(mean), linear, shares]):
        with pytest.raises(ModelError, match=r"changes its '(0\.)?kept' .* another layer has the same tensor"):
            check_examined(setup_of_net(nn.Sequential(*layers)))
    check_examined(setup_of_net(nn.Sequential(alike, linear, alike)))  # nothing changes
    check_examined(setup_of_net(nn.Sequential(nn.Sequential(mean, linear, mean))))  # one layer


@pytest.mark.parametrize("layer", KEPT.values(), ids=KEPT)
def test_what_holds_nothing_from_step_to_step_is_fine_under_every_layout(layer):
    check_examined(setup_of(layer, dp=2, chunks=4))


def test_indices_that_are_numbers_tell_the_shape():
    check_examined(setup_of(partial(Own, by_index), pipelined=True))


@pytest.mark.parametrize("forward", [item, as_array, by_mask])
def test_a_layer_that_reads_numbers_is_named_where_shapes_must_be_known(forward):
    layer = partial(Own, forward)
    for changes in ({"pipelined": True}, {"compile": True}, {"mode": "plan"}):
        with pytest.raises(PlanError, match="layer 'h.0' .* reads numbers out of tensors.*torch.where"):
            check_examined(setup_of(layer, **changes))
    check_examined(setup_of(layer))


@pytest.mark.parametrize("forward", [item, as_array, by_mask])
@pytest.mark.parametrize("layer, tensor", CHANGED.values(), ids=CHANGED)
def test_a_layer_that_reads_numbers_does_not_hide_what_is_wrong_with_later_layers(forward, layer, tensor):
    reads_before = setup_of(layer, chunks=4)
    reads_before.chain.layers[0] = LayerSpec("first", partial(Own, forward))
    with pytest.raises(PlanError, match=f"'h.0' .* changes its '{tensor}' .* with parallel.chunks=4"):
        check_examined(reads_before)


class ReadsNumbers(ClassCrossEntropy):
    """A loss of the outputs that ``read`` chooses."""

    def __init__(self, read):
        self.read = read

    def __call__(self, output, targets, weights):
        return super().__call__(*self.read(output, targets), weights)


READS = {
    "a mask": lambda x, y: (x[y == 0], y[y == 0]),
    "item": lambda x, y: (x / x.detach().abs().max().item(), y),
    "an array": lambda x, y: (x * float(x.detach().numpy().max()), y),
    "no meta kernel": lambda x, y: (x * len(torch.bincount(y)), y),
    "the layer's own": None,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loss_may_read_numbers_in_every_layout_as_no_shape_depends_on_it(read):
    class Head(nn.Flatten):
        def loss(self, x, targets, weights):
            return ReadsNumbers(READS["a mask"])(self(x), targets, weights)

    setup = setup_of(partial(nn.Linear, 8, 8), pipelined=True)
    if read is None:
        setup.chain.layers[-1] = LayerSpec("last", Head)
    else:
        setup.chain = replace(setup.chain, loss=ReadsNumbers(read))
    check_examined(setup)
    (found,) = trace(setup.chain, setup.sample, "fp32", "cpu")[-1].outputs
    assert (found.shape, found.dtype, found.requires_grad) == ((), torch.float32, True)


def test_a_layer_that_fails_is_still_named_with_its_error():
    with pytest.raises(TrainingError, match=r"layer 'h.0' \(Linear\): .*9"):
        check_examined(setup_of(partial(nn.Linear, 9, 9)))


class Twins(nn.Module):
    """Normalises two halves by one BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = BatchNorm1d(4)

    def forward(self, x):
        return torch.cat([self.norm(half) for half in x.chunk(2, dim=1)], dim=1)


def test_a_batchnorm_that_is_called_twice_is_refused_in_every_layout():
    for changes in ({}, {"dp": 2, "strategy": "ddp"}):
        with pytest.raises(ModelError, match=r"'h.0' \(Twins\): .* the BatchNorm 'h.0.norm' 2 times, .*one .*for each"):
            check_examined(setup_of(Twins, **changes))


class Holding(nn.Module):
    """Uses its weight by way of what ``hold`` makes of the module."""

    def __init__(self, hold):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = hold(self)

    def forward(self, x):
        return self.held(x)


class Holder:
    """Holds a parameter, and is no module."""

    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return nn.functional.linear(x, self.held[0] if isinstance(self.held, list) else self.held)


WEIGHT, ELSEWHERE = nn.Parameter(torch.ones(8, 8)), nn.Linear(8, 8)
FROZEN = nn.Parameter(torch.ones(8), requires_grad=False)
HIDDEN = {
    "a functools.partial": lambda module: partial(nn.functional.linear, weight=module.linear.weight),
    "a lambda": lambda module: lambda x: x @ WEIGHT,
    "an object": lambda module: Holder(module.linear.weight),
    "a list in an object": lambda module: Holder([module.linear.weight]),
    "a global module": lambda module: lambda x: ELSEWHERE(x),
}


class Passing(nn.Module):
    """Returns its parameter beside its output, for the next layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x, self.scale


class Scaled(nn.Module):
    """Multiplies by what the layer before has passed on."""

    def forward(self, x, scale):
        return x * scale


def test_a_parameter_may_be_passed_on_to_the_next_layer():
    setup = setup_of(Passing)
    setup.chain.layers.insert(2, LayerSpec("scaled", Scaled))
    check_examined(setup)


REACHED = {
    "a method of a child": lambda module: module.linear.forward,
    "an object that holds a child": lambda module: partial(nn.Module.__call__, module.linear),
    "one that is made in the forward": lambda module: lambda x: nn.LayerNorm(8, device=x.device)(x),
    "a frozen one that is global": lambda module: lambda x: x * FROZEN.to(x.device),
}


@pytest.mark.parametrize("hold", REACHED.values(), ids=REACHED)
def test_a_parameter_may_be_used_by_way_of_its_module(hold):
    check_examined(setup_of(partial(Holding, hold)))


@pytest.mark.parametrize("hold", HIDDEN.values(), ids=HIDDEN)
def test_a_parameter_that_is_not_reached_by_modules_is_refused_in_every_layout(hold):
    for changes in ({}, {"dp": 2, "strategy": "ddp"}):
        with pytest.raises(ModelError, match=r"'h.0' \(Holding\): .*a parameter that is not an attribute"):
            check_examined(setup_of(partial(Holding, hold), **changes))


def in_rows():
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.GRU(8, 8), Own(lambda self, outputs: outputs[0]))


@pytest.mark.parametrize("layer", [nn.PReLU, in_rows])
def test_samples_in_float64_as_numpy_makes_them_pass_a_layer_that_takes_one_dtype(layer):
    setup = setup_of(layer)
    setup.chain.layers.pop(0)
    setup.sample.inputs = setup.sample.inputs.double()
    check_examined(setup)


class ChangesOne(nn.Module):
    """Changes the first of its inputs, which may be the second, too."""

    def forward(self, x, y):
        return x.mul_(2) + y


@pytest.mark.parametrize("twice", [lambda self, x: (x, x), lambda self, x: (x, x[:, :1])])
def test_an_input_that_is_changed_in_place_has_no_other_in_its_memory_where_each_is_a_copy(twice):
    for changes in ({"pp": 2}, {"shards": 2}, {"activation_checkpointing": True}, {}):
        setup = setup_of(partial(Own, twice), **changes)
        setup.chain.layers.insert(2, LayerSpec("changes", ChangesOne))
        if changes:
            with pytest.raises(ModelError, match=r"'changes' \(ChangesOne\): it changes an input .*x.clone\(\)"):
                check_examined(setup)
        else:
            check_examined(setup)


def spoilt(self, x):
    squares = x * x
    return squares + x.add_(1).sin()


def spoilt_inside(self, x):
    hidden = x * 2
    return hidden * hidden + hidden.exp_()


@pytest.mark.parametrize("forward", [spoilt, spoilt_inside])
def test_what_a_backward_needs_is_not_changed_in_place_where_torch_recomputes(forward):
    with pytest.raises(ModelError, match="'h.0' .*in place that its backward needs.*activation_checkpointing=false"):
        check_examined(setup_of(partial(Own, forward), activation_checkpointing=True))
    check_examined(setup_of(partial(Own, forward)))  # torch's own error names the operator
    for fine in (nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), BatchNorm1d(8)):
        check_examined(setup_of(partial(copy.deepcopy, fine), activation_checkpointing=True))


@torch.library.custom_op("layers_checked::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_autograd(lambda ctx, gradient: gradient * 2)


def jacobian(self, x):
    return torch.vmap(torch.func.jacrev(lambda row: (row * row).sum(0, keepdim=True)))(x).flatten(1)


def attention(self, x):
    q = x.detach()[:, None, None]  # on a CPU it has no backward
    return x + flex_attention(q, q, q).flatten(1)


def nested(self, x):
    return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor(list(x)), 0.0)


# What the meta device, fake tensors, dispatch modes or hooks of saved tensors refuse.
ONLY_WITH_NUMBERS = {
    "a custom operator": lambda self, x: torch.ops.layers_checked.double(x),
    "a sparse product": lambda self, x: (torch.eye(8).to_sparse_coo() @ x.T).T,
    "a compressed sparse product": lambda self, x: (torch.eye(8).to_sparse_csr() @ x.T).T,
    "torch.cond": lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "binomial": lambda self, x: x * torch.binomial(torch.full_like(x, 5.0), torch.full_like(x, 0.5)),
    "flex_attention": attention,
    "nested tensors": nested,
    "torch.func": jacobian,
}


@pytest.mark.filterwarnings("ignore")  # of torch, about prototypes
@pytest.mark.parametrize("forward", ONLY_WITH_NUMBERS.values(), ids=ONLY_WITH_NUMBERS)
def test_a_layer_that_runs_only_with_numbers_is_tried_with_them(forward):
    for changes in ({}, {"pipelined": True, "pp": 2}, {"mode": "plan"}):
        check_examined(setup_of(partial(Own, forward), **changes))
    setup, before = setup_of(partial(Own, forward)), torch.get_rng_state()
    traced = trace(setup.chain, setup.sample, "fp32", "cpu", Measure)
    assert [(x.shape, x.dtype, x.requires_grad) for x in traced[1].outputs] == [((4, 8), torch.float32, True)]
    assert [layer.seen[1].flops for layer in (traced[0], traced[2])] == [2 * 4 * 8 * 8, 0]
    assert torch.equal(torch.get_rng_state(), before)
    layers = setup.chain.build(setup.chain.names, 0, torch.device("cpu"))
    layers(setup.sample.inputs).sum().backward()  # torch keeps nothing of the attempts
    assert layers["first"].weight.grad.norm() > 0


class Weighted:
    """A loss with a tensor of its own, or an operator that torch cannot compute without numbers."""

    metrics = ()

    def __init__(self, weigh):
        self.weigh = weigh

    def __call__(self, output, targets, weights):
        return ClassCrossEntropy()(self.weigh(output), targets, weights)._replace(metrics=())


@pytest.mark.parametrize("weigh", [lambda x: x * WEIGHT[0].detach(), torch.ops.layers_checked.double])
def test_a_loss_that_runs_only_with_numbers_is_tried_with_them(weigh):
    for changes in ({}, {"pipelined": True, "pp": 2}, {"mode": "plan"}):
        setup = setup_of(nn.Tanh, **changes)
        setup.chain = replace(setup.chain, loss=Weighted(weigh))
        check_examined(setup)
    setup = setup_of(nn.Tanh, device_type="cuda")
    setup.chain = replace(setup.chain, loss=Weighted(weigh))
    with pytest.raises(TrainingError, match="loss Weighted"):
        check_examined(setup)


def test_what_torch_says_of_a_layer_with_numbers_is_quoted():
    def forward(self, x):
        return torch.linalg.cholesky(torch.ops.layers_checked.double(x))

    with pytest.raises(TrainingError, match=r"layer 'h.0' \(Own\): .*square"):
        check_examined(setup_of(partial(Own, forward)))


def test_a_tensor_that_a_layer_makes_elsewhere_is_said_unless_that_is_where_the_run_is():
    with pytest.raises(TrainingError, match="layer 'h.0' .* its input's device.*register_buffer.*=x.device"):
        check_examined(setup_of(partial(Own, elsewhere), device_type="cuda"))
    check_examined(setup_of(partial(Own, elsewhere)))


class Recomputing(nn.Module):
    """Recomputes a part of itself."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return x + checkpoint(self.part, x, use_reentrant=self.use_reentrant)


@pytest.mark.slow
def test_a_layer_with_a_checkpoint_of_its_own_trains_compiled_and_in_replicas_but_for_reentrant_ones(tmp_path):
    data, found = TensorData(torch.randn(64, 8), torch.zeros(64, dtype=torch.int64)), []
    quiet = ["logger=none", "device=cpu", "parallel.threads=1", "train.epochs=null", "train.steps=2"]
    quiet += ["train.global_batch_size=8"]
    layers = nn.Linear(8, 8), Recomputing(False), nn.Linear(8, 2)
    for i, layout in enumerate(("parallel=single", "train.compile=true", "parallel=ddp")):
        words = [*quiet, layout, f"hydra.run.dir={tmp_path}/{i}"]
        result = train(*words, model=nn.Sequential(*layers), loss=nn.CrossEntropyLoss(), data=data)
        found.append(result.summary["final_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
    layers[1].use_reentrant = True
    with pytest.raises(UserError, match="use_reentrant=True.* set use_reentrant=False, or use parallel=fsdp"):
        words = [*quiet, "parallel=ddp", f"hydra.run.dir={tmp_path}/reentrant"]
        train(*words, model=nn.Sequential(*layers), loss=nn.CrossEntropyLoss(), data=data)
