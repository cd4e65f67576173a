"""Configurations build objects of this project and of torch, and nothing else."""

import pytest

from common.errors import DataError, TrainingError
from training.instantiate import instantiate


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
        lambda bad: {"_target_": "torch.nn.Sequential", "_args_": [bad]},
        lambda bad: {"_target_": "training.lr.Constant", "deep": {"deeper": [[{"deepest": bad}]]}},
        lambda bad: [bad],
    ],
    ids=["itself", "an argument", "a positional argument", "far down", "in a list"],
)
def test_a_target_from_elsewhere_is_refused_at_any_depth_and_does_not_run(wrap, witness):
    from omegaconf import OmegaConf

    for node in (wrap(system(witness)), OmegaConf.create(wrap(system(witness)))):
        with pytest.raises(
            TrainingError, match="_target_=os.system is not allowed.*models, data, parallel, training"
        ):
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
        "training.checkpoint.save.shutil.os.system",
        "torch.nn.modules.module.torch.os.popen",
    ],
)
def test_a_detour_through_an_allowed_module_runs_no_command(target, witness):
    """Hydra 1.3.8 knows these by what they resolve to."""
    with pytest.raises(Exception, match="not allowed|blocklisted"):
        instantiate({"_target_": target, "_args_": [f"touch '{witness}'"]})
    assert not witness.exists()


@pytest.mark.parametrize(
    "target",
    [f"training.checkpoint.save.{name}" for name in ("Path.touch", "shutil.copyfile", "os.mkdir")],
)
def test_what_an_allowed_module_has_imported_is_not_allowed_with_it(target, witness, tmp_path):
    (tmp_path / "source").touch()
    arguments = [str(tmp_path / "source"), str(witness)] if target.endswith("copyfile") else [str(witness)]
    with pytest.raises(Exception, match="not allowed|blocklisted|authorized"):
        instantiate({"_target_": target, "_args_": arguments})
    assert not witness.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.modules.module.torch.load",
        "torch.nn.modules.module.torch.hub.load",
        "torch.nn.functional.importlib.import_module",
        "torch.nn.parallel.distributed.dist.init_process_group",
        "torch.nn.init.normal_",
        "torch.optim.Adam.load_state_dict",
        "torch.optim.optimizer.functools.partial",
        "training.reporting.environment._run",
        "training.reporting.write_json",
        "training.reporting.metrics.log.handlers.clear",
        "training.checkpoint.load",
        "training.run.run",
        "data.download.download",
        "data.cache.cached_folder",
        "data.digits.Path",
        "models.gpt2.gpt2.__globals__.get",
        "models.chain.Chain.__init__",
        "models.chain.Layer.__subclasses__",
        "parallel.stage.Stage.__class__",
    ],
)
def test_functions_that_do_more_than_compute_and_whatever_is_private_are_refused(target):
    for node in ({"_target_": target}, {"_target_": target, "_partial_": True, "_args_": ["x"]}):
        with pytest.raises(TrainingError, match=f"_target_={target} is not allowed: it "):
            instantiate(node)


def test_a_target_among_further_arguments_is_refused_unless_they_are_data(witness):
    run_config = {"parallel": {"env": system(witness)}}
    logger = {"_target_": "training.reporting.NoLogger", "_recursive_": False, "_convert_": "all"}
    assert instantiate(logger, run_config=run_config).url is None
    with pytest.raises(TrainingError, match="_target_=os.system is not allowed"):
        instantiate({**logger, "_recursive_": True}, run_config=run_config)
    assert not witness.exists()


@pytest.mark.parametrize("target", [["os.system"], 7, print, {"_target_": "os.system"}])
def test_a_target_that_is_no_name_is_refused(target):
    with pytest.raises(TrainingError, match="is not allowed"):
        instantiate({"_target_": target})


@pytest.mark.parametrize("target", ["models.nothing.here", "torch.optim.Adma", "training.lr.constant"])
def test_a_name_that_names_nothing_is_a_users_mistake(target):
    with pytest.raises(TrainingError, match=f"_target_={target} names nothing"):
        instantiate({"_target_": target})


def test_allowed_targets_are_built_with_further_arguments():
    layer = instantiate({"_target_": "torch.nn.Linear", "in_features": 3}, out_features=2)
    assert tuple(layer.weight.shape) == (2, 3)


def test_a_users_mistake_comes_out_of_a_constructor_as_it_is():
    with pytest.raises(DataError) as error:
        instantiate({"_target_": "data.regression.RandomRegression", "samples": 0})
    assert str(error.value) == "data.samples=0: it must be at least 1"
    assert error.value.__cause__ is None


def test_a_plain_value_error_becomes_a_message_for_the_user():
    with pytest.raises(TrainingError, match="too many heads|divide|n_head"):
        size = {"size": "tiny", "n_head": 5, "n_layer": None, "n_embd": None, "block_size": None}
        instantiate({"_target_": "models.gpt2.gpt2", **size, "vocab_size": 128, "dropout": 0.0})


def test_a_mistake_in_the_code_keeps_its_own_error():
    with pytest.raises(Exception, match="takes no arguments") as error:
        instantiate({"_target_": "training.lr.Constant", "surplus": 1})
    assert not isinstance(error.value, TrainingError)
