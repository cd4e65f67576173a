"""The YAML is the schema: the keys that an option lists are the parameters of what it builds. What a checkpoint names
is a class of this project or of torch."""

import pytest
from omegaconf import OmegaConf

from common.errors import TrainingError
from conf import FOLDER, OWN_KEYS, options
from conf.instantiate import checked_arguments, instantiate, parameters, resolve, why_foreign
from conf.messages import explain

GROUPS = ("model", "data", "optim", "scheduler", "logger", "callback")
SUPPLIED = {"optim": {"params"}, "logger": {"run_dir", "run_config", "run_name"}}  # by the program
OPTIONS = [f"{group}/{option}" for group in GROUPS for option in options(group)]


def section_of(group, option):
    tree = OmegaConf.load(FOLDER / group / f"{option}.yaml")
    return OmegaConf.to_container(tree.model if group == "model" else tree, resolve=False)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_options_file_lists_the_parameters_of_what_it_builds(option, monkeypatch):
    monkeypatch.setattr("conf.instantiate.find_spec", lambda name: name)  # mlflow need not be installed
    group, name = option.split("/")
    section = section_of(group, name)
    target = section.pop("_target_")
    pytest.importorskip(target.partition(".")[0])  # an optimizer of another package
    known = parameters(resolve(target))
    own = OWN_KEYS.get(group, set())
    assert set(section) - own == set(known) - SUPPLIED.get(group, set()) - own
    plain = {key: value for key, value in section.items() if key in known and "${" not in str(value)}
    assert checked_arguments(target, plain, f"{group}.") == plain  # each is of its parameter's type


@pytest.mark.parametrize("option", OPTIONS)
def test_each_key_says_what_it_means(option):
    _, _, listed = (FOLDER / f"{option}.yaml").read_text().partition("_target_")
    keys = [line.strip() for line in listed.partition("\n\n")[0].partition("others:")[0].splitlines()[1:]]
    assert all(" # " in line for line in keys if not line.startswith("name: "))


def test_an_error_of_the_program_is_not_explained():
    assert explain(KeyError("x")) is None


@pytest.mark.parametrize(
    "target",
    """builtins.eval torch.load database.connect training.run.rank.os.system data.text.Path.touch torch.nn.init.normal_
    data.cache.fetch models.gpt2.gpt2.__globals__.get""".split(),
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
