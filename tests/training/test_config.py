"""What the command line offers: groups, options, values, one page of help."""

import re
import shlex

import pytest
from commandline import ROOT, train
from composed import compose

CONF = ROOT / "conf"
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("schema", "hydra", "__pycache__")
}
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What --help prints."""
    run = train(["--help"], tmp_path_factory.mktemp("help") / "run", own_folder=False)
    assert (run.code, run.stderr) == (0, "")
    return run.stdout


def test_help_is_one_page(page):
    lines = page.rstrip().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("group", [group for group, options in GROUPS.items() if options])
def test_help_names_every_option_of_every_group(page, group):
    typed = "callbacks" if group == "callback" else group  # callbacks=[one,another]
    assert sorted(listed_options(page)[typed]) == GROUPS[group]


def listed_options(page):
    """What the section Groups lists: ``GROUP=  one | two   a remark``, which may go on in the next lines."""
    section = page.partition("Groups (")[2].partition("\n")[2].partition("Values (")[0]
    _, *parts = re.split(r"(\w+)= *", section)
    found = {}
    for group, text in zip(parts[::2], parts[1::2], strict=True):
        without_remarks = [re.split(r"  +", line.strip())[0] for line in text.splitlines()]
        words = [word.strip() for line in without_remarks for word in line.split("|")]
        found[group] = [word for word in words if re.fullmatch(r"\w+", word)]
    return found


def test_help_names_values_that_exist(page):
    from omegaconf import OmegaConf

    models = ["model=gpt2", "model=transformer", "model=convnet", "model=gpt2 data=text", "model=gpt2 data=jsonl"]
    trees = [compose(*words.split()) for words in models]
    listed = (
        page.partition("Values (")[2].partition("\n")[2].partition("Examples")[0].replace("(model=gpt2)", "")
    )
    values = re.findall(r"(?<![\w./=])((?:\w+\.)*\w+)=", listed)
    assert len(values) > 15
    for value in values:
        assert any(OmegaConf.select(t, value, default="no") != "no" for t in trees), f"{value} is not there"


def examples(page):
    lines = page.split("Examples:")[1].splitlines()
    return [re.split(r"  +", line.strip())[0] for line in lines if "train.py" in line]


def test_every_example_of_the_page_composes(page):
    commands = examples(page)
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)
        overrides = [word for word in words[words.index("train.py") + 1 :] if word != "-m"]
        sweep = "-m" in words
        compose(*(re.sub(r",.*", "", word) if sweep else word for word in overrides))


@pytest.mark.parametrize("group, option", OPTIONS, ids=lambda word: word)
def test_every_option_of_every_group_composes_and_says_its_name(group, option):
    if group == "callback":
        assert compose(f"+callback@callbacks.{option}={option}").callbacks[option]._target_
        return
    if group == "launcher":
        assert compose(f"{group}={option}").launcher.name == option
        return
    cfg = compose(f"{group}={option}")
    if group in ("model", "parallel"):
        assert cfg[group].name == option
    elif group in ("data", "optim", "scheduler", "logger"):
        assert cfg[group]._target_


def test_a_wrong_type_in_any_section_is_refused():
    for override in ("seed=many", "optim.lr=fast", "data.noise=much", "model.hidden=1.5", "parallel.dp=[1]"):
        with pytest.raises(Exception, match=override.partition("=")[0]):
            compose(override)


def test_gpt2_brings_a_data_set_an_optimizer_and_a_schedule_by_itself():
    cfg = compose("model=gpt2")
    assert cfg.data._target_ == "data.torch_docs.TorchDocs"
    assert cfg.optim._target_ == "torch.optim.AdamW"
    assert cfg.scheduler._target_ == "training.optimizer.CosineWarmup"
    assert cfg.train.grad_clip == 1.0


def test_a_larger_gpt2_learns_at_a_lower_rate_and_a_tiny_one_in_more_steps():
    sizes = [compose("model=gpt2", f"model.size={size}") for size in ("tiny", "124M", "350M", "774M", "1558M")]
    rates = [cfg.optim.lr for cfg in sizes]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[1] > rates[2]
    assert sizes[0].train.steps > sizes[1].train.steps
    assert compose("model=gpt2", "model.size=tiny", "optim.lr=0.5", "train.steps=3").optim.lr == 0.5


def test_an_evaluation_covers_the_whole_split_unless_it_is_told_otherwise():
    for model in ("gpt2", "resnet50", "transformer"):
        assert compose(f"model={model}").train.eval_batches is not None
        assert compose(f"model={model}", "mode=eval").train.eval_batches is None
        assert compose(f"model={model}", "mode=eval", "train.eval_batches=3").train.eval_batches == 3


def test_the_toy_model_brings_its_own():
    cfg = compose()
    assert (cfg.model.name, cfg.data._target_) == ("toy", "data.random_regression.RandomRegression")
    assert (cfg.optim._target_, cfg.scheduler._target_) == ("torch.optim.SGD", "training.optimizer.Constant")


@pytest.mark.parametrize(
    "model, data, optim",
    [
        ("resnet50", "data.random_images.RandomImages", "torch.optim.SGD"),
        ("transformer", "data.stdlib.Stdlib", "torch.optim.AdamW"),
        ("classifier", "data.digits.Digits", "torch.optim.Adam"),
        ("convnet", "data.digits.Digits", "torch.optim.Adam"),
    ],
)
def test_every_other_model_brings_data_and_an_optimizer_too(model, data, optim):
    cfg = compose(f"model={model}")
    assert (cfg.data._target_, cfg.optim._target_) == (data, optim)


def test_text_is_cut_as_the_model_wants_it():
    assert compose("model=transformer").data.vocabulary == "words"
    assert compose("model=transformer", "data=wikitext2").data.vocabulary == "words"
    assert compose("model=gpt2").data.vocabulary == "gpt2"
    assert compose("model=gpt2", "data.vocabulary=words").data.vocabulary == "words"


def test_images_are_made_as_the_model_wants_them():
    for model, shape in (("classifier", (3, 32)), ("convnet", (1, 28)), ("resnet50", (3, 28))):
        data = compose(f"model={model}", "data=digits").data
        assert (data.channels, data.image_size) == shape, model


@pytest.mark.parametrize("model_comes", ["first", "last"])
def test_the_command_line_wins_over_what_the_model_brings(model_comes):
    own = [
        "data=wikitext2",
        "optim=sgd",
        "scheduler=step",
        "train.grad_clip=0.25",
        "train.steps=7",
        "optim.lr=0.3",
    ]
    cfg = compose(*(["model=gpt2", *own] if model_comes == "first" else [*own, "model=gpt2"]))
    assert cfg.data._target_ == "data.wikitext2.WikiText2"
    assert (cfg.optim._target_, cfg.optim.lr) == ("torch.optim.SGD", 0.3)
    assert cfg.scheduler._target_ == "training.optimizer.Step"
    assert (cfg.train.grad_clip, cfg.train.steps) == (0.25, 7)


def test_debug_stands_on_top_of_the_model_and_below_the_command_line():
    assert compose("model=gpt2", "debug=limit").train.steps == 3
    assert compose("model=toy", "debug=limit").train.epochs is None
    assert compose("model=gpt2", "debug=limit", "train.steps=9").train.steps == 9


def test_the_seed_of_the_run_is_the_seed_of_the_data():
    assert compose("seed=5").data.seed == 5


def test_the_workers_environment_is_set_as_the_schema_says():
    """conf/schema.py: "such as {NCCL_DEBUG: INFO}"."""
    assert compose("parallel.env={NCCL_DEBUG: INFO}").parallel.env == {"NCCL_DEBUG": "INFO"}
