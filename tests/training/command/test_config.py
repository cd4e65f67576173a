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
from conf.instantiate import to_config
from conf.schema import Parallel, Root
from models.toy import toy
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
    assert section not in ("model", "parallel", "launcher") or cfg.name == option
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


EXPLAINED = [
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
    ("model=toy verify", "verify.steps=2 "),
    ("callbacks=[early_stop,gradient_histogram]", "callbacks.gradient_histogram.bins=32 "),
]


@pytest.mark.parametrize("words, said", EXPLAINED)
def test_help_explains_a_section_a_group_an_option_or_a_key(words, said):
    assert said in help.answer(["--help", *words.split()])


SUGGESTED = [
    ("paralel", "there is no paralel to explain; did you mean parallel or"),
    ("gpt2", "did you mean model=gpt2? Sections: callbacks, cluster,"),
    ("model=gtp2", "there is no model=gtp2; did you mean model=gpt2? There are: classifier,"),
    ("train.stpes", "there is no key train.stpes; did you mean train.steps? There are: steps, epochs,"),
    ("data.feild", "did you mean data.field?"),
    ("--nonsense", "--nonsense: settings are written without dashes"),
]


@pytest.mark.parametrize("word, said", SUGGESTED)
def test_help_suggests_what_an_unknown_word_may_mean(word, said):
    with pytest.raises(UserError, match=re.escape(said)):
        help.answer(["--help", word])


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


def gpt2(lr, seq_len=64, rates=None, warmup_ratio=0.2):
    """What is composed of GPT-2: as it is published for its size, if nothing is said."""
    return {"optim.lr": lr, "optim.rates": rates, "scheduler.warmup_ratio": warmup_ratio, "data.seq_len": seq_len}


def brings(data, optim, scheduler):
    targets = {"data": f"data.{data}", "optim": f"torch.optim.{optim}", "scheduler": f"training.optimizer.{scheduler}"}
    return {f"{section}._target_": target for section, target in targets.items()}


FIRST_RUN = {"seq_len": 80, "rates": {"c_proj": 0.2}, "warmup_ratio": 0.4}
OWN = "data=wikitext2 optim=sgd scheduler=step train.grad_clip=0.25 train.steps=7 optim.lr=0.3"
OWN_VALUES = {
    **brings("wikitext2.WikiText2", "SGD", "Step"),
    "optim.lr": 0.3,
    "train.grad_clip": 0.25,
    "train.steps": 7,
}
COMPOSED = [
    # Only GPT-2's first run has a recipe; otherwise it is trained as published for its number of parameters.
    ("model=gpt2", gpt2(5e-4, **FIRST_RUN)),
    ("model=gpt2 optim=adamw seed=3 parallel=pipe_ddp train.eval_every=6", gpt2(5e-4, **FIRST_RUN)),
    ("model=gpt2 optim.lr=0.5", gpt2(0.5, **FIRST_RUN)),
    ("model=gpt2 recipe=published", gpt2(6e-4)),
    ("model=gpt2 train.steps=1000", gpt2(6e-4)),
    ("model=gpt2 train.steps=null train.epochs=1", gpt2(6e-4)),
    ("model=gpt2 data=text data.root=notes.txt", gpt2(6e-4, seq_len=256)),
    ("model=gpt2 model.size=350M", gpt2(3e-4)),
    ("model=gpt2 model.size=tiny", gpt2(3e-3)),
    ("model=gpt2 model.n_layer=4 model.n_head=4 model.n_embd=128", gpt2(2.5e-3)),
    ("model=gpt2 model.n_layer=96 model.n_head=96 model.n_embd=12288", gpt2(6e-5)),
    ("model=gpt2 optim=muon model.size=350M", gpt2(0.02)),
    ("model=gpt2 experiment=gpt2_524k", gpt2(6e-4, seq_len=1024)),
    # No optimizer gets the rate of another model or of another optimizer.
    ("model=convnet optim=adamw", {"optim.lr": 1e-3}),
    ("model=toy optim=adamw +model.size=tiny", {"optim.lr": 1e-3}),
    ("model=resnet50", {"optim.lr": 1e-3}),
    ("model=resnet50 optim=muon", {"optim.lr": 0.02}),
    ("optim=sgd", {"optim.lr": 0.05}),
    # Every model brings data, an optimizer and a schedule.
    ("model=toy", brings("random_regression.RandomRegression", "SGD", "Constant")),
    ("model=gpt2", brings("torch_docs.TorchDocs", "AdamW", "CosineWarmup")),
    ("model=llama", brings("torch_docs.TorchDocs", "AdamW", "CosineWarmup")),
    ("model=resnet50", brings("random_images.RandomImages", "SGD", "Constant")),
    ("model=transformer", brings("stdlib.Stdlib", "AdamW", "CosineWarmup")),
    ("model=classifier", brings("digits.Digits", "Adam", "Constant")),
    ("model=convnet", brings("digits.Digits", "Adam", "Constant")),
    # Text and images are made as the model wants them.
    ("model=transformer", {"data.vocabulary": "words"}),
    ("model=transformer data=wikitext2", {"data.vocabulary": "words"}),
    ("model=gpt2", {"data.vocabulary": "gpt2"}),
    ("model=gpt2 data.vocabulary=words", {"data.vocabulary": "words"}),
    ("data=wikitext2 data.batchify=true train.global_batch_size=20", {"data.columns": 20}),
    ("model=classifier data=digits", {"data.channels": 3, "data.image_size": 32}),
    ("model=convnet data=digits", {"data.channels": 1, "data.image_size": 28}),
    ("model=resnet50 data=digits", {"data.channels": 3, "data.image_size": 28}),
    # The command line wins over what the model brings, wherever it stands; debug stands between them.
    (f"model=gpt2 {OWN}", OWN_VALUES),
    (f"{OWN} model=gpt2", OWN_VALUES),
    ("model=gpt2 debug=limit", {"train.steps": 3}),
    ("model=toy debug=limit", {"train.epochs": None}),
    ("debug=anomaly", {"train.detect_anomaly": True}),
    ("debug=profile train.profile=3", {"train.profile": 3, "train.steps": 10}),
    ("model=gpt2 debug=limit train.steps=9", {"train.steps": 9}),
    # An evaluation covers the whole split, unless it is told otherwise.
    *((f"model={model} mode=eval", {"train.eval_batches": None}) for model in ("gpt2", "llama", "resnet50")),
    ("model=transformer mode=eval", {"train.eval_batches": None}),
    ("model=transformer mode=eval train.eval_batches=3", {"train.eval_batches": 3}),
]


@pytest.mark.parametrize("words, values", COMPOSED)
def test_a_command_composes_the_values_that_its_words_mean(words, values):
    cfg = compose(*words.split())
    assert {key: OmegaConf.select(cfg, key) for key in values} == values


RECIPES = [
    ([], "recipe: first_run, AdamW at lr 0.0005, made for these 18 steps; other data, steps or sizes train as "
     "published, at lr 0.0006 (recipe=published)"),
    (["train.steps=1000"], "recipe: published, AdamW at lr 0.0006, by the number of parameters"),
    (["train.steps=1000", "optim=sgd"],
     "recipe: published, AdamW at lr 0.0006, by the number of parameters; here SGD at lr 0.05"),
    (["train.steps=1000", "optim.lr=1e-3"],
     "recipe: published, AdamW at lr 0.0006, by the number of parameters; here AdamW at lr 0.001"),
]  # fmt: skip


@pytest.mark.parametrize("words, said", RECIPES)
def test_the_plan_says_which_recipe_a_run_has(words, said):
    assert describe_recipe(compose("model=gpt2", *words)) == said
    assert describe_recipe(compose("model=toy")) == ""
    assert describe_recipe(with_given(compose("model=gpt2", *words), {"model": toy()})) == ""


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
