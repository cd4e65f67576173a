"""What the command line offers: groups, options, values, one page of help."""

import re
import shlex

import pytest
from commandline import ROOT, train
from composed import compose
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from conf import help, keys
from conf.composition import _before_jobs
from conf.instantiate import instantiate, to_config
from conf.schema import Parallel, Root
from data.dataset import DataSet
from models.toy import toy
from train import main
from training.command.api import with_given
from training.command.errors import described
from training.run.prepare import describe_recipe

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
    models = ["model=gpt2", "model=transformer", "model=convnet", "model=gpt2 data=text", "model=gpt2 data=jsonl"]
    trees = [compose(*words.split()) for words in models]
    listed = page.partition("Values (")[2].partition("\n")[2].partition("Examples")[0].replace("(model=gpt2)", "")
    values = re.findall(r"(?<![\w./=])((?:\w+\.)*\w+)=", listed)
    assert len(values) > 15
    for value in values:
        assert any(OmegaConf.select(t, value, default="no") != "no" for t in trees), f"{value} is not there"
    nodes = {"": Root, "parallel": Parallel, **keys.sections()}
    allowed = {key.name: key.choices for section, node in nodes.items() for key in keys.schema_keys(node, section)}
    named = re.findall(r"(?<![\w./=])((?:\w+\.)*\w+)=([\w|]+\|[\w|]+)", listed)
    closed = {name: words.split("|") for name, words in named if allowed.get(name)}
    assert len(closed) >= 6
    assert {name: words for name, words in closed.items() if not {*words} <= {*allowed[name]}} == {}


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


SECTIONS = ["export", "sample", "train", "sweep", "verify"]
TYPED = [f"{group}={option}" for group, option in OPTIONS if group not in ("experiment", "debug", "callback")]


@pytest.mark.parametrize("word", [*SECTIONS, *TYPED])
def test_help_gives_every_key_of_a_section_its_default_and_a_meaning(word):
    section, _, option = word.partition("=")
    cfg = compose(word)[section] if option else OmegaConf.structured(Root)[section]
    found = explained(help.answer(["--help", word]))
    for key, value in cfg.items():
        name = f"{section}.{key}"
        if key != "_target_":
            default, meaning = found[name]
            assert meaning and not re.match(r"\w+\.\w+", meaning), f"{name} has no meaning"
            if isinstance(value, (int, float)):
                assert default == str(value).lower() or float(default) == value


def explained(text):
    """The default and the meaning of each key that an explanation lists: ``  KEY=DEFAULT   MEANING``."""
    rows = re.findall(r"^  (\w+\.[\w.]+)(?:=(.*?))?\s{2,}(\S.*)$", text, flags=re.MULTILINE)
    return {name: (default, meaning) for name, default, meaning in rows}


@pytest.mark.parametrize(
    "words, said",
    [
        ("parallel", "parallel=hsdp            Groups of ranks, each of which shares one copy of the parameters"),
        ("parallel", "order of forwards and backwards in a pipeline (gpipe | 1f1b |"),
        ("parallel=pipe_ddp", "parallel.chunks=4 "),
        ("launcher", "launcher.nodes=1 "),
        ("optim", "optim.decay_vectors=false "),
        ("model=gpt2", "data=torch_docs optim=adamw scheduler=cosine_warmup train.steps=18"),
        ("model=gpt2", "Recipes: recipe=published, recipe=first_run, recipe=finetune"),
        ("experiment=gsm8k_lora", "model.size=135M"),
        ("train.steps", "  train.steps=null  optimizer steps;"),
        ("train.steps=3", "  train.steps=null  optimizer steps;"),
        ("model.lora", "  model.lora.rank=null "),
        ("data.field", "data=jsonl\n  data.field=text "),
        ("mode", "verify | compare)"),
        ("model=toy verify", "verify.steps=5 "),
        ("callbacks=[early_stop,gradient_histogram]", "callbacks.gradient_histogram.bins=32 "),
    ],
)
def test_help_explains_a_section_a_group_an_option_or_a_key(words, said):
    assert said in help.answer(["--help", *words.split()])


@pytest.mark.parametrize(
    "word, said",
    [
        ("paralel", "there is no paralel to explain; did you mean parallel or"),
        ("gpt2", "did you mean model=gpt2? Sections: callbacks, cluster,"),
        ("model=gtp2", "there is no model=gtp2; did you mean model=gpt2? There are: classifier,"),
        ("train.stpes", "there is no key train.stpes; did you mean train.steps? There are: steps, epochs,"),
        ("data.feild", "did you mean data.field?"),
        ("--nonsense", "--nonsense: settings are written without dashes"),
    ],
)
def test_help_suggests_what_an_unknown_word_may_mean(word, said):
    with pytest.raises(UserError, match=re.escape(said)):
        help.answer(["--help", word])


@pytest.mark.parametrize(
    "word, said",
    [
        ("train.lr=1", "there is no key train.lr; did you mean optim.lr?"),
        ("dp=2", "there is no key dp; did you mean parallel.dp?"),
        ("steps=2", "there is no key steps; did you mean train.steps or verify.steps?"),
        ("parallel.chnks=2", "there is no key parallel.chnks; did you mean parallel.chunks? There are:"),
        ("nonsense=2", "there is no key nonsense; there are hydra,"),
    ],
)
def test_a_key_of_another_section_is_suggested(word, said, capsys):
    assert main([word]) == 1
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_help_explains_a_users_own_option_without_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM", "to-be-hidden")
    (tmp_path / "data").mkdir()
    own = ["# My rows.", "_target_: mine.Rows", "columns: # their names", "  - a", "  - b", "rows: 7 # how many"]
    own += ["team: ${oc.env:TEAM} # who", "same: ${.team} # whose", ""]
    (tmp_path / "data" / "mine.yaml").write_text("\n".join(own))
    arguments = ["--config-dir", str(tmp_path), "--help"]
    assert "data=mine" in help.answer([*arguments, "data"])
    text = help.answer([*arguments, "data=mine"])
    assert explained(text)["data.rows"] == ("7", "how many")
    assert explained(text)["data.columns"] == ("[a,b]", "their names")
    assert explained(text)["data.same"] == ("${oc.env:TEAM}", "whose") and "to-be-hidden" not in text


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
    elif group == "data":
        root = {"root": "somewhere"} if "root" in cfg.data else {}
        assert isinstance(instantiate({**cfg.data, **root}), DataSet)
    elif group in ("optim", "scheduler", "logger"):
        assert cfg[group]._target_


FIRST_RUN = {"lr": 5e-4, "rates": {"c_proj": 0.2}, "warmup_ratio": 0.4, "seq_len": 80}


def published(lr, seq_len=64):
    return {"lr": lr, "rates": None, "warmup_ratio": 0.2, "seq_len": seq_len}


@pytest.mark.parametrize(
    "words, trained",
    [
        ([], FIRST_RUN),
        (["optim=adamw", "seed=3", "parallel=pipe_ddp", "train.eval_every=6"], FIRST_RUN),
        (["optim.lr=0.5"], {**FIRST_RUN, "lr": 0.5}),
        (["recipe=published"], published(6e-4)),
        (["train.steps=1000"], published(6e-4)),
        (["train.steps=null", "train.epochs=1"], published(6e-4)),
        (["data=text", "data.root=notes.txt"], published(6e-4, seq_len=256)),
        (["model.size=350M"], published(3e-4)),
        (["model.size=tiny"], published(3e-3)),
        (["model.n_layer=4", "model.n_head=4", "model.n_embd=128"], published(2.5e-3)),
        (["model.n_layer=96", "model.n_head=96", "model.n_embd=12288"], published(6e-5)),
        (["optim=muon", "model.size=350M"], published(0.02)),
        (["experiment=gpt2_524k"], published(6e-4, seq_len=1024)),
    ],
)
def test_gpt2_trains_as_published_for_its_parameters_and_only_the_first_run_has_a_recipe_of_its_own(words, trained):
    cfg = compose("model=gpt2", *words)
    found = {"lr": cfg.optim.lr, "rates": cfg.optim.rates}
    found |= {"warmup_ratio": cfg.scheduler.warmup_ratio, "seq_len": cfg.data.seq_len}
    assert found == trained


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "recipe: first_run, AdamW at lr 0.0005, made for these 18 steps; other data, steps or sizes train as "
         "published, at lr 0.0006 (recipe=published)"),
        (["train.steps=1000"], "recipe: published, AdamW at lr 0.0006, by the number of parameters"),
        (["train.steps=1000", "optim=sgd"],
         "recipe: published, AdamW at lr 0.0006, by the number of parameters; here SGD at lr 0.05"),
        (["train.steps=1000", "optim.lr=1e-3"],
         "recipe: published, AdamW at lr 0.0006, by the number of parameters; here AdamW at lr 0.001"),
    ],
)  # fmt: skip
def test_the_plan_says_which_recipe_a_run_has(words, said):
    assert describe_recipe(compose("model=gpt2", *words)) == said
    assert describe_recipe(compose("model=toy")) == ""
    assert describe_recipe(with_given(compose("model=gpt2", *words), {"model": toy()})) == ""


@pytest.mark.parametrize(
    "words, lr",
    [
        (["model=convnet", "optim=adamw"], 1e-3),
        (["model=toy", "optim=adamw", "+model.size=tiny"], 1e-3),
        (["model=resnet50"], 1e-3),
        (["model=resnet50", "optim=muon"], 0.02),
        (["optim=sgd"], 0.05),
    ],
)
def test_no_optimizer_gets_the_rate_of_another_model_or_of_another_optimizer(words, lr):
    assert compose(*words).optim.lr == lr


def test_an_evaluation_covers_the_whole_split_unless_it_is_told_otherwise():
    for model in ("gpt2", "llama", "resnet50", "transformer"):
        assert compose(f"model={model}").train.eval_batches is not None
        assert compose(f"model={model}", "mode=eval").train.eval_batches is None
        assert compose(f"model={model}", "mode=eval", "train.eval_batches=3").train.eval_batches == 3


BRINGS = {
    "toy": ("data.random_regression.RandomRegression", "torch.optim.SGD", "training.optimizer.Constant"),
    "gpt2": ("data.torch_docs.TorchDocs", "torch.optim.AdamW", "training.optimizer.CosineWarmup"),
    "llama": ("data.torch_docs.TorchDocs", "torch.optim.AdamW", "training.optimizer.CosineWarmup"),
    "resnet50": ("data.random_images.RandomImages", "torch.optim.SGD", None),
    "transformer": ("data.stdlib.Stdlib", "torch.optim.AdamW", None),
    "classifier": ("data.digits.Digits", "torch.optim.Adam", None),
    "convnet": ("data.digits.Digits", "torch.optim.Adam", None),
}


def test_every_model_brings_data_an_optimizer_and_a_schedule():
    for model, (data, optim, scheduler) in BRINGS.items():
        cfg = compose(f"model={model}")
        assert (cfg.data._target_, cfg.optim._target_) == (data, optim)
        assert scheduler in (None, cfg.scheduler._target_)


def test_text_is_cut_as_the_model_wants_it():
    assert compose("model=transformer").data.vocabulary == "words"
    assert compose("model=transformer", "data=wikitext2").data.vocabulary == "words"
    assert compose("model=gpt2").data.vocabulary == "gpt2"
    assert compose("model=gpt2", "data.vocabulary=words").data.vocabulary == "words"


def test_the_columns_of_a_text_follow_the_global_batch():
    words = ["data=wikitext2", "data.vocabulary=words", "data.batchify=true", "train.global_batch_size=20"]
    data = instantiate(compose(*words).data)
    assert data.columns == 20 and data.vocab_size is None


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


def test_what_a_sweep_over_options_itself_reads_is_composed_before_its_jobs():
    group, key, *kept = "parallel=single,ddp", "parallel.chunks=2", "sweep.objective=val_loss", "hydra.sweep.dir=x"
    assert _before_jobs([group, key, *kept]) == [group, *kept]
    assert _before_jobs([key, *kept, "optim.lr=1,2"]) == [key, *kept, "optim.lr=1,2"]


@pytest.mark.parametrize("build, kind", [(to_config, KeyboardInterrupt), (OmegaConf.create, OmegaConfBaseException)])
def test_an_interrupt_from_which_omegaconf_makes_an_error_stays_an_interrupt(build, kind, monkeypatch):
    def interrupted(self, item):
        monkeypatch.setattr(ListConfig, "_set_flag", None)  # what OmegaConf calls afterwards fails
        raise KeyboardInterrupt

    monkeypatch.setattr(ListConfig, "append", interrupted)
    with pytest.raises(kind) as error:
        build({"steps": [1, 2]})
    assert described(error.value) == (1, "stopped by SIGINT")
