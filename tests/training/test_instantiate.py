"""Sections build what they name; of others, only classes of this project and of torch are named."""

import pytest

from common.errors import DataError, TrainingError
from conf.instantiate import checked_arguments, instantiate, why_foreign


@pytest.mark.parametrize(
    "target",
    [
        "builtins.eval",
        "subprocess.run",
        "torch.load",
        "torch.hub.load",
        "torchvision.io.read_file",
        "datasets.load_dataset",
        "database.connect",
        "hydra.utils.get_method",
        "torch.nn",
        "",
        ["os.system"],
        7,
        "training.run.os.system",
        "training.setup.shutil.copyfile",
        "torch.nn.modules.module.torch.load",
        "torch.nn.functional.importlib.import_module",
        "torch.nn.parallel.distributed.dist.init_process_group",
        "data.text.Path.touch",
        "data.text.Path",
        "torch.nn.init.normal_",
        "torch.optim.Adam.load_state_dict",
        "torch.optim.optimizer.functools.partial",
        "training.reporting.environment._run",
        "training.reporting.write_json",
        "training.reporting.metrics.log.handlers.clear",
        "training.checkpoint.load",
        "training.run.run",
        "data.cache.fetch",
        "data.cache.cached_folder",
        "data.digits.Path",
        "models.gpt2.gpt2.__globals__.get",
        "models.chain.Chain.__init__",
        "models.chain.Layer.__subclasses__",
        "parallel.stage.Stage.__class__",
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


@pytest.mark.parametrize("target", [["os.system"], 7, {"_target_": "os.system"}, "", "nothing"])
def test_a_target_that_is_no_name_is_refused(target):
    with pytest.raises(TrainingError, match="names nothing"):
        instantiate({"_target_": target})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"lr": "wide"}, "lr: Value 'wide' of type 'str' could not be converted to Float"),
        ({"nesterov": "perhaps"}, "nesterov: Value 'perhaps' .* Boolean"),
        ({"weight_decay": None}, "weight_decay: Value None of type 'NoneType' could not be converted to Float"),
        ({"lrr": 1}, "there is no key lrr; did you mean lr"),
    ],
)
def test_a_value_of_another_type_is_named(changes, said):
    with pytest.raises(TrainingError, match=said):
        checked_arguments("torch.optim.SGD", changes)


def test_whole_numbers_are_real_ones_where_these_are_wanted_and_null_where_it_may_be():
    assert repr(checked_arguments("torch.optim.SGD", {"lr": 1, "foreach": None})) == "{'lr': 1.0, 'foreach': None}"


@pytest.mark.parametrize("target", ["models.nothing.here", "torch.optim.Adma", "training.optimizer.constant"])
def test_a_name_that_names_nothing_is_a_users_mistake(target):
    with pytest.raises(TrainingError, match=f"_target_={target} names nothing"):
        instantiate({"_target_": target})


def test_allowed_targets_are_built_with_further_arguments():
    layer = instantiate({"_target_": "torch.nn.Linear", "in_features": 3}, out_features=2)
    assert tuple(layer.weight.shape) == (2, 3)


def test_a_users_mistake_comes_out_of_a_constructor_as_it_is():
    with pytest.raises(DataError) as error:
        instantiate({"_target_": "data.random_regression.RandomRegression", "samples": 0})
    assert str(error.value) == "data.samples=0: it must be at least 1"
    assert error.value.__cause__ is None


def test_a_plain_value_error_becomes_a_message_for_the_user():
    with pytest.raises(TrainingError, match="too many heads|divide|n_head"):
        size = {"size": "tiny", "n_head": 5, "n_layer": None, "n_embd": None, "block_size": None}
        instantiate({"_target_": "models.gpt2.gpt2", **size, "vocab_size": 128, "dropout": 0.0})


def test_a_parameter_that_the_target_does_not_have_is_named():
    with pytest.raises(TrainingError, match="surplus"):
        instantiate({"_target_": "training.optimizer.Constant", "surplus": 1})


def test_inner_sections_with_a_target_are_built_first():
    layers = instantiate({"_target_": "models.layers.Layers", "layers": [["x", {"_target_": "torch.nn.ReLU"}]]})
    assert type(layers["x"]).__name__ == "ReLU"
