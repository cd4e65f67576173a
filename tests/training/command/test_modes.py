"""mode=eval, export and sample on one checkpoint, saved on two stages."""

import json
import os
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from commandline import train
from composed import config, execute, records, run, run_layout, saved
from safetensors.torch import load_file

from common.errors import TrainingError
from common.packages import load_torchvision
from conf import MODES
from training.command import modes


@pytest.fixture(scope="module")
def model(text):
    sizes = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.block_size=32"]
    return [*sizes, *text, "train.global_batch_size=8", "train.eval_batches=2", "train.precision=fp32"]


@pytest.fixture(scope="module")
def begin(ranks, tmp_path_factory):
    """``begin("ddp", …)`` runs that layout and returns its folder."""
    return lambda layout, *overrides: run_layout(ranks, layout, tmp_path_factory.mktemp(layout), *overrides)


@pytest.fixture(scope="module")
def trained(begin, model):
    """The run directory of three steps on two stages, evaluated at the end."""
    return begin("pipelined", *model, "train.steps=3", "optim.lr=1e-2")


@pytest.fixture(scope="module")
def words(text, tmp_path_factory):
    """A trained transformer on words: its overrides and its run directory."""
    sizes = ["model=transformer", "model.d_model=16", "model.d_hid=16", "model.n_layer=1", *text]
    folder = tmp_path_factory.mktemp("words")
    run(folder, *sizes, "train.steps=2", "train.eval_every=null", "train.global_batch_size=4")
    return sizes, folder


def do(folder, *overrides, capsys=None):
    """One command in this process; returns what it printed."""
    folder.mkdir(exist_ok=True)
    execute(config(*overrides), folder, None)
    return capsys.readouterr().out if capsys else None


@pytest.mark.parametrize("layout", ["single", "ddp", "pipe_ddp"])
def test_every_strategy_finds_the_validation_loss_that_the_training_found(begin, model, trained, layout):
    folder = begin(layout, *model, "mode=eval", f"checkpoint='{trained}'")
    wanted = json.loads((trained / "summary.json").read_text())
    found = json.loads((folder / "summary.json").read_text())
    assert found["best_val_loss"] == pytest.approx(wanted["best_val_loss"], rel=1e-5)
    assert found["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-5)
    assert (found["steps"], found["parallel"]) == (3, layout)
    assert [line["step"] for line in records(folder)] == [3, 3]


def test_one_process_is_enough_and_more_are_refused(tmp_path, model, trained):
    from launchers import World

    cfg = config(*model, "parallel=pipe_ddp", "mode=export", f"checkpoint='{trained}'")
    with pytest.raises(TrainingError, match="mode=export runs in one process, but 4 were started"):
        execute(cfg, tmp_path, World(0, 4, 0, 4, "torchrun"))


# -- export ------------------------------------------------------------------------------------------------------------


def test_any_folder_that_does_not_exist_can_be_exported_to_is_said_and_is_whole(model, trained, tmp_path, capsys):
    line = [*model, "mode=export", f"checkpoint='{trained}'", f"export_to='{tmp_path}/elsewhere/out'"]
    said = do(tmp_path / "run", *line, capsys=capsys)
    assert f"exported gpt2 after step 3 to {tmp_path}/elsewhere/out" in said
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "out").iterdir()) == names
    with pytest.raises(TrainingError, match="exists already; choose another export_to="):
        do(tmp_path / "run", *line)


@pytest.mark.slow
def test_a_model_of_words_is_exported_with_as_many_and_without_an_end_of_text(model, tmp_path):
    """Its vocabulary is padded in the model, and known only when the text has been read."""
    line = [*model, "data.vocabulary=words", "model.vocab_size=512"]
    run(tmp_path, *line, "train.steps=1", "train.eval_every=null")
    for form in ("safetensors", "torch_export"):
        export = ["mode=export", f"export.format={form}", f"export_to='{tmp_path}/{form}'"]
        do(tmp_path / "run", *line, *export, f"checkpoint='{tmp_path}'")
    count = len((tmp_path / "torch_export" / "vocabulary.txt").read_text().splitlines())
    written = json.loads((tmp_path / "safetensors" / "config.json").read_text())
    assert written["vocab_size"] == count < 512
    assert written["eos_token_id"] is written["bos_token_id"] is None
    (program,) = (tmp_path / "torch_export").glob("*.pt2")
    logits = torch.export.load(program).module()(torch.zeros(1, 4, dtype=torch.int64))
    assert logits.shape[-1] == count


def test_a_transformer_goes_as_its_state_and_its_words(words, tmp_path):
    sizes, trained = words
    do(tmp_path, *sizes, "mode=export", f"checkpoint='{trained}'")
    state = load_file(tmp_path / "export" / "model.safetensors")
    wanted = saved(trained, 2)
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    listed = (tmp_path / "export" / "vocabulary.txt").read_text().splitlines()
    assert listed[0] == "<unk>" and len(listed) == len(state["encoder.embedding.weight"])


def test_a_resnet_loads_into_torchvision_with_its_buffers(tmp_path):
    model = ["model=resnet50", "model.num_classes=7", "data.samples=20", "data.image_size=32"]
    run(tmp_path / "run", *model, "train.steps=1", "train.global_batch_size=4", "train.eval_every=null")
    do(tmp_path, *model, "mode=export", f"checkpoint='{tmp_path / 'run'}'")
    state = load_file(tmp_path / "export" / "model.safetensors")
    load_torchvision()
    from torchvision.models import resnet50

    theirs = resnet50(num_classes=7)
    theirs.load_state_dict(state)
    assert theirs.bn1.running_mean.abs().sum() > 0, "statistics of the training, not the initial zeros"


# -- sample ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def say(model, trained, tmp_path, capsys):
    def draw(*options):
        return do(tmp_path, *model, "mode=sample", f"checkpoint='{trained}'", *options, capsys=capsys)

    return draw


def test_the_text_goes_on_from_the_prompt_and_depends_on_the_seed_alone(say):
    text = say("sample.prompt='def main'", "sample.tokens=12")
    assert text.startswith("def main") and len(text) > 12
    assert say("sample.prompt='def main'", "sample.tokens=12", "parallel=pipe_ddp") == text
    assert say("sample.prompt='def main'", "sample.tokens=12", "seed=7") != text


def test_several_prompts_go_on_at_once_the_first_as_if_it_were_alone(say):
    line = ["sample.tokens=6", "sample.seed=7", "sample.top_p=0.9"]
    texts = say("sample.prompts=['def main','class A:']", *line).split("\n" + 20 * "-" + "\n")
    assert [text[:8] for text in texts] == ["def main", "class A:"]
    assert say("sample.prompt='def main'", *line) == texts[0] + "\n"


def test_what_is_kept_from_token_to_token_does_not_change_the_text(say):
    line = ["sample.prompt='def main'", "sample.tokens=40"]  # the model has 32 positions
    text = say(*line)
    assert say(*line, "sample.cache=false") == text
    assert say(*line, "sample.seed=1337") == text != say(*line, "sample.seed=7")
    assert say(*line, "sample.temperature=0") == say(*line, "sample.top_k=1") != text
    assert say(f"sample.prompt='{'a b c ' * 20}'", "sample.tokens=40").startswith("a b c")


@pytest.mark.parametrize("key", ["sample.prompt", "sample.prompts"])
def test_a_prompt_that_is_not_utf_8_is_refused_before_anything_is_loaded(tmp_path, key):
    typed = os.fsdecode("café".encode("latin-1"))
    value = f"'{typed}'" if key == "sample.prompt" else f"['a','{typed}']"
    with pytest.raises(TrainingError, match=r"the prompt 'caf\\udce9' is not text: .*not UTF-8.*Latin-1.*in UTF-8"):
        do(tmp_path, "model=gpt2", "mode=sample", "checkpoint=nowhere", f"{key}={value}")


def test_a_model_of_words_speaks_in_words(words, tmp_path, capsys, caplog):
    sizes, trained = words
    ask = [*sizes, "mode=sample", f"checkpoint='{trained}'", "sample.tokens=5"]
    said = do(tmp_path, *ask, "sample.prompt='The parser xyzzy'", capsys=capsys)
    assert said.startswith("the parser <unk> ") and len(said.split()) == 8
    assert "read as <unk>: xyzzy" in caplog.text
    with pytest.raises(TrainingError, match="needs some to continue: sample.prompt="):
        do(tmp_path, *ask)


# -- the whole way, as a user types it ---------------------------------------------------------------------------------


EXTRA = """'model.extra_tokens={"<a>": "start of an entity", "<b>": null}'"""


def test_extra_tokens_and_a_prompt_as_a_shell_gives_them(model, trained, tmp_path):
    """The checkpoint's vocabulary is padded: the two tokens take rows that it has."""
    line = f"""{EXTRA} mode=sample checkpoint={trained} sample.prompt="if (x, [<a>]): it's" sample.tokens=4"""
    sampled = train([*model, *shlex.split(line)], tmp_path / "sample")
    assert sampled.code == 0, sampled.console
    assert sampled.stdout.startswith("if (x, [<a>]): it's")


def test_each_mode_is_a_file_with_a_function_run_and_nothing_else_is():
    files = {path.stem for path in Path(modes.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(MODES)
    assert all(callable(import_module(f"{modes.__name__}.{name}").run) for name in MODES)
