"""Configurations build objects of this project and of torch, and nothing else."""

import pytest
from omegaconf import OmegaConf

from common.errors import DataError, TrainingError, UserError
from common.files import read_yaml
from conf.instantiate import instantiate


@pytest.fixture
def witness(tmp_path):
    return tmp_path / "was here"


def system(path):
    return {"_target_": "os.system", "command": f"touch '{path}'"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda bad: bad,
        lambda bad: {"_target_": "torch.nn.Sequential", "first": bad},
        lambda bad: {"_target_": "training.optimizer.Constant", "deep": {"deeper": [[{"deepest": bad}]]}},
        lambda bad: [bad],
    ],
    ids=["itself", "an argument", "far down", "in a list"],
)
def test_a_target_from_elsewhere_is_refused_at_any_depth_and_does_not_run(wrap, witness):
    for node in (wrap(system(witness)), OmegaConf.create(wrap(system(witness)))):
        with pytest.raises(TrainingError, match="_target_=os.system is not allowed.*models, data, parallel, training"):
            instantiate(node)
    assert not witness.exists()


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
    ],
)
def test_only_the_named_packages_are_open(target):
    with pytest.raises(TrainingError, match="is not allowed"):
        instantiate({"_target_": target})


@pytest.mark.parametrize(
    "target",
    [
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
def test_detours_functions_that_do_more_than_compute_and_whatever_is_private_are_refused(target, witness):
    with pytest.raises(TrainingError, match=f"_target_={target} (is not allowed: it |names nothing)"):
        instantiate({"_target_": target}, str(witness))
    assert not witness.exists()


def test_targets_among_further_arguments_are_data(witness):
    run_config = {"parallel": {"env": system(witness)}}
    assert instantiate({"_target_": "training.reporting.NoLogger"}, run_config=run_config) is not None
    assert not witness.exists()


@pytest.mark.parametrize("target", [["os.system"], 7, {"_target_": "os.system"}])
def test_a_target_that_is_no_name_is_refused(target):
    with pytest.raises(TrainingError, match="is not allowed"):
        instantiate({"_target_": target})


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
    with pytest.raises(TrainingError, match="_target_=training.optimizer.Constant.*'surplus'"):
        instantiate({"_target_": "training.optimizer.Constant", "surplus": 1})


def test_inner_sections_with_a_target_are_built_first():
    layers = instantiate({"_target_": "models.layers.Layers", "layers": [["x", {"_target_": "torch.nn.ReLU"}]]})
    assert type(layers["x"]).__name__ == "ReLU"


def test_a_configuration_whose_aliases_stand_for_gigabytes_is_refused_before_they_are_written_out(tmp_path):
    names = "abcdefghijklmnopqrst"
    lines = [f"{name}: &{name} [*{last}, *{last}]" for last, name in zip(names, names[1:], strict=False)]
    path = tmp_path / "config.yaml"
    for text in ("\n".join(["a: &a [x, x]", *lines]), "a: &a [1, *a]"):
        path.write_text(text)
        with pytest.raises(UserError, match="config.yaml: its aliases .* stand for over 100,000 values"):
            read_yaml(path)
    path.write_text("a: &a {x: 1}\nb: *a\n")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 1}}
    path.write_text("- seed=1\n- train.steps=2\n")
    assert list(read_yaml(path)) == ["seed=1", "train.steps=2"]
