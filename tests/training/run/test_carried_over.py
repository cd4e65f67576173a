"""What a run takes over from a checkpoint: all of it, and only what still means the same."""

import pickle
import signal

import pytest
import torch
from torch import nn

from common.errors import CheckpointError, TrainingError, UserError
from data.dataset import Batch
from data.tensors import TensorData
from launchers import stopping
from launchers.stopping import Stopped
from models.module_pickling import dumps
from training import train
from training.callbacks import Callback

QUIET = ["parallel.threads=1", "logger=none"]
ADAM = ["train.precision=fp64", "optim=adam", "optim.lr=0.02", "train.epochs=null", "train.global_batch_size=40"]
WORDS = [*QUIET, *ADAM]
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double()


class Net(nn.Module):
    """Two layers, and by choice a branch, a buffer or a frozen first layer."""

    def __init__(self, *parts):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 2).double()
        if "branch" in parts:
            self.c = nn.Linear(6, 2).double()
        if "buffer" in parts:
            self.register_buffer("seen", torch.zeros(1))
        self.a.requires_grad_("frozen" not in parts)

    def forward(self, x):
        return self.b(self.a(x).tanh()) + (self.c(x) if hasattr(self, "c") else 0)


def go(folder, *words, model=None, valid=None):
    """A training of ``Net``, or another model, that learns the first two columns."""
    targets = X[:, :2]
    data = TensorData(X, targets, valid=(X, targets if valid is None else valid), test=0)
    return train(*words, f"hydra.run.dir={folder}", model=model or Net(), loss=nn.MSELoss(), data=data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for parts in ((), ("branch",), ("buffer",), ("frozen",)):
        go(folder / "-".join(["run", *parts]), *WORDS, "train.steps=2", model=Net(*parts))
    return folder


NOT_OF_THE_MODEL = {
    "a branch is gone": ("run-branch", (), "module.c.bias, module.c.weight are not the model's"),
    "a branch is new": ("run", ("branch",), "module.c.weight is not in it"),
    "a buffer is gone": ("run-buffer", (), "module.seen is not the model's"),
    "a buffer is new": ("run", ("buffer",), "module.seen is not in it"),
}
NOT_TRAINED = {
    "a layer is frozen now": ("run", ("frozen",), "it trained module.a.bias, which is frozen now"),
    "a layer is trained now": ("run-frozen", (), "module.a.bias was frozen in it, and is trained now"),
}


@pytest.mark.parametrize("typed", ["mode=eval checkpoint=", "train.steps=3 train.resume="])
@pytest.mark.parametrize("saved, parts, says", NOT_OF_THE_MODEL.values(), ids=NOT_OF_THE_MODEL)
def test_a_checkpoint_of_another_module_is_refused_by_what_either_lacks(runs, tmp_path, typed, saved, parts, says):
    with pytest.raises(CheckpointError, match=f"does not fit this model: {says}"):
        go(tmp_path, *f"{typed}{runs}/{saved}".split(), model=Net(*parts))


@pytest.mark.parametrize("saved, parts, says", NOT_TRAINED.values(), ids=NOT_TRAINED)
def test_the_state_of_an_optimizer_of_other_parameters_is_refused_on_resuming_only(runs, tmp_path, saved, parts, says):
    with pytest.raises(CheckpointError, match=says):
        go(tmp_path / "resumed", f"train.resume={runs}/{saved}", "train.steps=3", model=Net(*parts))
    go(tmp_path / "evaluated", "mode=eval", f"checkpoint={runs}/{saved}", model=Net(*parts))


STOPPING = ["train.eval_every=2", "callbacks=[early_stop]"]
OTHER_EVALUATIONS = {
    "the same": (X[:, :2], [], False),
    "other validation data": (X[:, :2] * 30, [], True),
    "fewer batches": (X[:, :2], ["train.eval_batches=1", "train.global_batch_size=20"], True),
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return go(tmp_path_factory.mktemp("evaluated") / "a", *WORDS, *STOPPING, "train.steps=8").run_dir


@pytest.mark.parametrize("valid, words, anew", OTHER_EVALUATIONS.values(), ids=OTHER_EVALUATIONS)
def test_the_best_result_of_other_validation_data_is_not_compared(evaluated, tmp_path, capfd, valid, words, anew):
    more = [f"train.resume={evaluated}", "train.steps=18"]
    result = go(tmp_path, *WORDS, *STOPPING, *words, *more, valid=valid)
    losses = [record["val_loss"] for record in result.metrics if "val_loss" in record]
    assert len(losses) == 5 and result.summary["best_val_loss"] == min(losses)
    said = "".join(capfd.readouterr())
    assert ("best weights begin anew: step 8 was the best by other validation data" in said) == anew


def test_a_run_with_another_global_batch_size_goes_on_with_the_next_row_of_the_epoch(tmp_path):
    """Row i adds 2^i to the loss, so that the loss of a step shows its rows."""
    powers = (2.0 ** torch.arange(40, dtype=torch.float64))[:, None]
    model = nn.Sequential(nn.Linear(1, 1, bias=False).double(), nn.Identity())
    nn.init.ones_(model[0].weight)
    given = {"model": model, "loss": nn.L1Loss(), "data": TensorData(powers, 0 * powers, valid=0, test=0)}
    words = [*QUIET, "train.precision=fp64", "optim=sgd", "optim.lr=0", "scheduler=constant"]
    used = []
    for place, (size, steps, total) in enumerate([(8, 3, 3), (4, 2, 5), (2, 4, 9)]):
        resumed = [f"train.resume={tmp_path}/{place - 1}"] if place else []
        last = f"train.steps={total}" if total < 9 else "train.steps=null"
        result = train(*words, *resumed, f"train.global_batch_size={size}", "train.epochs=1", last,
                       f"hydra.run.dir={tmp_path}/{place}", **given)  # fmt: skip
        losses = [int(record["loss"] * size) for record in result.metrics if "loss" in record]
        assert len(losses) == steps
        used += [i for loss in losses for i in range(40) if loss >> i & 1]
    assert sorted(used) == [*range(40)]


class StopsItself(Callback):
    def on_step(self, run, record):
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_of_one_process_in_a_program_saves_when_it_is_told_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_state", stopping._State())  # commands in this process have left theirs
    before, words = signal.getsignal(signal.SIGTERM), [*WORDS, "train.steps=9"]
    assert before is signal.SIG_DFL, "as in most programs"
    with pytest.raises(Stopped, match="stopped after step 4 of 9, saved in "):
        go(tmp_path, *words, f"+callbacks.stops._target_={__name__}.StopsItself")
    assert signal.getsignal(signal.SIGTERM) is before
    assert go(tmp_path, *words, "train.resume=auto").summary["steps"] == 9


class Averaging(torch.optim.SGD):
    """Steps from other weights than those to evaluate, as schedulefree does: here these are the steps' average."""

    switches = 0

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.training = False

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def _swap(self, training):
        for parameter in (p for group in self.param_groups for p in group["params"] if p in self.state):
            if self.training != training:
                other = self.state[parameter]["other"].clone()
                self.state[parameter]["other"].copy_(parameter)
                parameter.copy_(other)
        Averaging.switches += self.training != training
        self.training = training

    @torch.no_grad()
    def step(self, closure=None):
        assert self.training
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            mean = self.state[parameter].setdefault("other", parameter.clone())
            mean.lerp_(parameter, 0.25)


class Norms(Callback):
    seen = []

    def on_evaluation(self, run, record):
        self.seen.append(run.strategy.norm(lambda weight: weight))


class Packed(torch.Tensor):
    """A tensor of another kind, as quantized states are."""


class Packing(torch.optim.SGD):
    """Keeps its momentum as such a tensor."""

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["packed"] = parameter.detach().clone().as_subclass(Packed)


OPTIM = "{{_target_: {name}.{kind}, lr: 0.05, update: elementwise, decay_vectors: true, rates: null, others: null}}"


def with_optimizer(tmp_path, kind):
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "own.yaml").write_text(OPTIM.format(name=__name__, kind=kind))
    words = ["train.precision=fp64", "train.epochs=null", "train.global_batch_size=40", "scheduler=constant"]
    return [*QUIET, f"--config-dir={tmp_path}/conf", "optim=own", *words]


def test_an_optimizer_with_modes_is_evaluated_saved_and_resumed_as_in_a_plain_loop(tmp_path):
    words = [*with_optimizer(tmp_path, "Averaging"), "train.eval_every=3"]
    Averaging.switches = 0
    go(tmp_path / "a", *words, "train.steps=5")
    assert Averaging.switches == 10, "around evaluations and saves, not around each step"
    Norms.seen.clear()
    words += [f"train.resume={tmp_path}/a", f"+callbacks.norms._target_={__name__}.Norms"]
    result = go(tmp_path / "b", *words, "train.steps=9")
    net, wanted, norms = Net(), [], []
    optimizer = Averaging(net.parameters(), lr=0.05)
    for step in range(1, 10):
        optimizer.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), X[:, :2]).backward()
        optimizer.step()
        optimizer.eval()
        if step % 3 == 0:
            wanted.append(nn.functional.mse_loss(net(X), X[:, :2]).item())
            norms.append(nn.utils.get_total_norm(net.parameters()).item())
    assert Norms.seen == pytest.approx(norms[1:], rel=1e-12)
    found = [record["val_loss"] for record in result.metrics if "val_loss" in record]
    assert found == pytest.approx(wanted[1:], rel=1e-12)
    for name, tensor in result.state_dict().items():
        torch.testing.assert_close(tensor, net.state_dict()[name], rtol=1e-12, atol=1e-12)


def test_a_state_that_no_checkpoint_can_hold_ends_the_run_after_its_first_step(tmp_path):
    words = with_optimizer(tmp_path, "Packing")
    with pytest.raises(TrainingError, match="a.weight/packed is a Packed, which a safetensors file cannot hold"):
        go(tmp_path / "a", *words, "train.steps=9")
    assert not (tmp_path / "a" / "metrics.jsonl").exists(), "a step was recorded"
    go(tmp_path / "b", *words, "train.steps=2", "train.checkpoint_every=null")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn], ids=str)
def test_buffers_of_newer_dtypes_are_saved_and_sent(tmp_path, dtype):
    net = Net("buffer")
    net.seen = torch.tensor([7.0]).to(dtype)
    result = go(tmp_path, *WORDS, "train.steps=1", model=net)
    assert pickle.loads(dumps(net)).seen.view(torch.uint8).equal(net.seen.view(torch.uint8))
    (seen,) = (tensor for name, tensor in result.state_dict().items() if name.endswith("seen"))
    assert seen.dtype == dtype and seen.float() == 7


def test_tensors_of_all_floating_point_dtypes_of_8_bits_are_sent():
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"):
        tensor = torch.tensor([0.5, 2.0]).to(getattr(torch, name))
        assert pickle.loads(dumps(tensor)).float().equal(tensor.float())


def test_samples_of_bfloat16_are_read_by_processes(tmp_path):
    batch = Batch(torch.randn(3, 2).bfloat16(), torch.arange(3))
    again = pickle.loads(pickle.dumps(batch.to_arrays())).to_tensors()
    assert torch.equal(again.inputs, batch.inputs) and torch.equal(again.targets, batch.targets)


def test_a_scheduler_in_a_folder_of_the_user_is_resumed_by_the_same_folder(tmp_path):
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    (tmp_path / "conf" / "scheduler" / "mine.yaml").write_text(f"_target_: {__name__}.Falling\n")
    own = [*QUIET, f"--config-dir={tmp_path}/conf"]
    go(tmp_path / "a", *own, *ADAM, "scheduler=mine", "train.steps=2")
    result = go(tmp_path / "b", *own, f"train.resume={tmp_path}/a", "train.steps=4")
    assert [record["lr"] for record in result.metrics if "lr" in record] == pytest.approx([0.02 / 3, 0.02 / 4])
    (tmp_path / "conf" / "scheduler" / "faster.yaml").write_text(f"_target_: {__name__}.Falling\npower: 2\n")
    other = go(tmp_path / "d", *own, "scheduler=faster", f"train.resume={tmp_path}/a", "train.steps=3")
    assert [record["lr"] for record in other.metrics if "lr" in record] == pytest.approx([0.02 / 9])
    with pytest.raises(UserError, match="scheduler._target_=.*Falling, which is not allowed"):
        go(tmp_path / "c", *QUIET, f"train.resume={tmp_path}/a", "train.steps=4")


class Falling:
    def __init__(self, power: int = 1):
        self.power = power

    def factor(self, step, total, per_epoch):
        return step**-self.power
