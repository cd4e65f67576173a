"""Sections build what they name; of others, only classes of this project and of torch are named."""

import pytest

from common.errors import TrainingError
from conf.instantiate import checked_arguments, instantiate, why_foreign


@pytest.mark.parametrize(
    "target",
    [
        "builtins.eval",
        "torch.load",
        "database.connect",
        ["os.system"],
        "training.run.os.system",
        "torch.nn.functional.importlib.import_module",
        "data.text.Path.touch",
        "torch.nn.init.normal_",
        "torch.optim.optimizer.functools.partial",
        "training.reporting.recorder._run",
        "training.checkpoint.load",
        "data.cache.fetch",
        "models.gpt2.gpt2.__globals__.get",
        "models.chain.Chain.__init__",
    ],
)
def test_what_a_checkpoint_or_a_peer_names_is_a_public_class_of_this_project_or_of_torchs_layers(target):
    try:
        assert why_foreign(target) is not None
    except TrainingError as error:
        assert "names nothing" in str(error) or "neither" in str(error)


def test_targets_among_further_arguments_are_data(tmp_path):
    run_config = {"parallel": {"env": {"_target_": "os.system", "command": f"touch {tmp_path}/x"}}}
    assert instantiate({"_target_": "training.reporting.NoLogger"}, run_config=run_config) is not None
    assert not list(tmp_path.iterdir())


def test_whole_numbers_are_real_ones_where_these_are_wanted_and_null_where_it_may_be():
    assert repr(checked_arguments("torch.optim.SGD", {"lr": 1, "foreach": None})) == "{'lr': 1.0, 'foreach': None}"


def test_allowed_targets_are_built_with_further_arguments():
    layer = instantiate({"_target_": "torch.nn.Linear", "in_features": 3}, out_features=2)
    assert tuple(layer.weight.shape) == (2, 3)


def test_inner_sections_with_a_target_are_built_first():
    layers = instantiate({"_target_": "models.chain.Layers", "layers": [["x", {"_target_": "torch.nn.ReLU"}]]})
    assert type(layers["x"]).__name__ == "ReLU"
