"""A module with a forward of its own: one layer, the same in every layout that runs it, its loss torch's."""

from copy import deepcopy

import pytest
import torch
from composed import losses, run_layout, saved
from own_modules import Reader
from torch import nn

from data.tensors import TensorData
from training import train, verify

LOSS = {"_target_": "torch.nn.CrossEntropyLoss", "ignore_index": 3, "label_smoothing": 0.1}
MODEL = {
    "_target_": "own_modules.Reader", "name": "reader", "hidden": 12, "loss": LOSS, "init_from": None, "lora": None,
}  # fmt: skip
WORDS = [
    "data=digits", "data.image_size=8", "optim=sgd", "optim.lr=0.5", "train.epochs=null", "train.steps=3",
    "train.global_batch_size=16", "train.precision=fp64", "train.eval_batches=1",
]  # fmt: skip


def test_a_module_that_the_configuration_names_learns_the_same_in_every_layout_that_runs_it(ranks, tmp_path):
    """Its labels that are ignored are not equally many on each rank."""
    runs = {name: run_layout(ranks, name, tmp_path / name, *WORDS, model=MODEL) for name in ("single", "ddp", "fsdp")}
    found = {name: losses(folder) for name, folder in runs.items()}
    assert len(found["single"]) == 3 and found["single"][-1] != found["single"][0]
    for name in ("ddp", "fsdp"):
        assert found[name] == pytest.approx(found["single"], rel=1e-12)
        ours, theirs = (saved(runs[one], 3) for one in (name, "single"))
        assert ours.keys() == theirs.keys() and "module.first.weight" in ours and "module.again.weight" not in ours
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.fixture
def own():
    """A module and samples of its kind, some without a label."""
    torch.manual_seed(3)
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    labels[::3] = -100
    return Reader(), TensorData(images, labels)


QUICK = ["train.epochs=null", "train.global_batch_size=16", "logger=none", "device=cpu", "parallel.threads=1"]


def test_a_module_that_is_given_starts_from_its_weights_and_takes_the_result(own, tmp_path):
    net, data = own
    net.dropout.p = 0.0
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    batch, words = data.train.read(torch.arange(len(data.train)).numpy(), 0), [*QUICK, f"hydra.run.dir={tmp_path}"]
    words += ["train.steps=1", f"train.global_batch_size={len(data.train)}", "train.precision=fp64", "optim=sgd"]
    result = train(*words, model=net, loss=nn.CrossEntropyLoss(), data=data)
    expected = nn.CrossEntropyLoss()(deepcopy(net).double()(batch[0].double()), batch[1]).item()
    assert result.summary["first_loss"] == pytest.approx(expected, rel=1e-7)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    net.load_state_dict(result.state_dict())
    assert not torch.equal(before["out.weight"], net.out.weight)
    assert net.again.weight is net.first.weight


def test_control_flow_on_numbers_is_no_finding_of_a_verification_where_it_runs(own, tmp_path):
    net, data = own
    words = [*QUICK, "train.precision=fp64", "parallel=ddp", "verify.processes=2", f"hydra.run.dir={tmp_path}"]
    report = verify(*words, model=net, loss=net.loss, data=data)
    assert report.ok, report
    assert "parallel=ddp dp=2" in (tmp_path / "certificate.html").read_text()
