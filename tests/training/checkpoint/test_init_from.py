"""Starting from exported or Hugging Face weights, with a vocabulary that grows."""

import json
import os
import shutil

import pytest
import torch
from composed import config, execute, run, run_layout, saved
from safetensors.torch import load_file, save_file

from common.errors import TrainingError, UserError
from conf.instantiate import to_dict
from conf.words import quote_value
from data.vocabulary import gpt2
from models.gpt2_sizes import sizes_of
from training.run.prepare import prepare

EMBEDDING = "embedding.wte.weight"
EXTRA = quote_value('model.extra_tokens={"<a>": "start of an entity", "<b>": null}')
NO_STEP = ["train.steps=1", "optim.lr=0", "train.eval_every=null"]


@pytest.fixture(scope="module")
def recipe(text):
    """Two layers, dropout, SGD."""
    sizes = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.dropout=0.1"]
    length = ["train.steps=3", "train.global_batch_size=8", "train.precision=fp32", "train.eval_batches=1"]
    return [*sizes, *text, *length, "optim=sgd", "optim.lr=0.1", "scheduler=constant"]


@pytest.fixture
def altered(published, tmp_path):
    """``altered(change, key=value)``: a copy of it with a changed dictionary of tensors, and a changed config.json."""

    def make(change=lambda state: None, **config):
        folder = shutil.copytree(published, tmp_path / "altered")
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return make


@pytest.fixture(scope="module")
def reference(recipe, published, tmp_path_factory):
    """What ``single`` does from the published weights with two more tokens."""
    folder = tmp_path_factory.mktemp("reference")
    run(folder, *recipe, EXTRA, f"model.init_from='{published}'", "parallel.chunks=4")
    return folder


def rows_of(folder):
    return load_file(folder / "model.safetensors")["transformer.wte.weight"]


def mean_of(rows, text):
    """The row of a token that is described by a text."""
    return rows[gpt2().encode_ordinary(text)].mean(dim=0)


def test_the_first_weights_are_the_files_and_the_new_rows_means_of_its_rows(recipe, published, tmp_path):
    run(tmp_path, *recipe, EXTRA, f"model.init_from='{published}'", *NO_STEP)
    ours, theirs = saved(tmp_path, 1), load_file(published / "model.safetensors")
    assert torch.equal(ours["h.1.mlp.c_fc.weight"], theirs["transformer.h.1.mlp.c_fc.weight"].t())
    rows, described = rows_of(published), mean_of(rows_of(published), "start of an entity")
    assert ours[EMBEDDING].shape == (50304, 32) and torch.equal(ours[EMBEDDING][:50257], rows)
    assert torch.allclose(ours[EMBEDDING][50257], described, atol=1e-6)
    assert torch.allclose(ours[EMBEDDING][50258:], rows.mean(dim=0).expand(46, -1), atol=1e-6)


def test_the_rule_holds_for_drawn_weights_too_and_all_others_stay(ranks, recipe, tmp_path):
    run(tmp_path / "plain", *recipe, *NO_STEP)
    run_layout(ranks, "pipelined", tmp_path / "grown", *recipe, EXTRA, *NO_STEP)
    before, after = (saved(tmp_path / name, 1)[EMBEDDING] for name in ("plain", "grown"))
    changed = (before != after).any(dim=1).nonzero().flatten().tolist()
    assert changed == [50257, 50258]
    assert torch.allclose(after[50258], before[:50257].mean(dim=0), atol=1e-7)
    assert torch.allclose(after[50257], mean_of(before, "start of an entity"), atol=1e-7)


def test_a_run_that_goes_on_keeps_what_its_new_rows_have_learned(recipe, published, reference, tmp_path):
    resume = f"train.resume='{reference / 'checkpoints' / 'latest'}'"
    gone = f"model.init_from='{tmp_path / 'gone'}'"  # needed for the first start only
    run(tmp_path, *recipe, EXTRA, gone, resume, "train.steps=4", "optim.lr=0")
    assert torch.equal(saved(tmp_path, 4)[EMBEDDING], saved(reference, 3)[EMBEDDING])


@pytest.fixture(scope="module")
def exported(recipe, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    execute(config(*recipe, EXTRA, "mode=export", f"checkpoint='{reference}'", "parallel=pipe_ddp"), folder, None)
    return folder / "export"


def test_an_export_with_its_tokens_is_started_from_as_it_is(recipe, reference, exported, tmp_path):
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == 50259
    more = quote_value('model.extra_tokens={"<a>": "the", "<b>": null, "<c>": "the"}')
    run(tmp_path, *recipe, more, f"model.init_from='{exported}'", *NO_STEP)
    again, wanted = saved(tmp_path, 1), saved(reference, 3)
    assert torch.equal(again[EMBEDDING][:50259], wanted[EMBEDDING][:50259]), "trained rows stay"
    assert torch.allclose(again[EMBEDDING][50259], mean_of(wanted[EMBEDDING], "the"), atol=1e-6)
    assert torch.equal(again["h.0.attn.c_attn.weight"], wanted["h.0.attn.c_attn.weight"])
    with pytest.raises(TrainingError, match='tokens <a>, <b> .*does not begin with them: empty.*"<a>": null, "<b>"'):
        prepare(config(*recipe, f"model.init_from='{exported}'"))


def test_an_export_has_the_names_of_the_published_gpt2(exported):
    """Without the prefix "transformer.", with which mlx-lm cannot read it."""
    names = load_file(exported / "model.safetensors").keys()
    assert {"wte.weight", "wpe.weight", "ln_f.bias", "h.0.attn.c_attn.weight"} < names and len(names) == 4 + 2 * 12


def test_the_exported_tokenizer_knows_the_new_tokens(exported):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with transformers (requirements-dev.txt)")
    theirs = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    text = "say <a>x<b> def f(x):\n\treturn  'é' # It's 12  \n\n<|x|>"
    assert theirs.encode(text).ids == gpt2(("<a>", "<b>")).encode(text, allowed_special="all")
    assert theirs.get_vocab_size() == 50259


def test_tokens_beyond_the_padding(recipe, published, tmp_path):
    many = json.dumps({f"<{i}>": "entity" if i == 49 else None for i in range(50)})
    extra = quote_value(f"model.extra_tokens={many}")
    run(tmp_path, *recipe, extra, f"model.init_from='{published}'", *NO_STEP)
    rows = saved(tmp_path, 1)[EMBEDDING]
    assert len(rows) == 50432
    assert torch.allclose(rows[50257 + 49], mean_of(rows, "entity"), atol=1e-6)
    assert torch.allclose(rows[50257 + 48], rows[:50257].mean(dim=0), atol=1e-6)


# -- files that do not fit ---------------------------------------------------------------------------------------------

BARE = ["model=gpt2", "data.seq_len=16", "train.global_batch_size=4", "train.precision=fp32"]
# What is typed, what is otherwise in config.json (None: there is none), another tensor in the file, and what is said.
DO_NOT_FIT = [
    ("model.n_head=8", {}, None, r"/config.json says n_head=4, the model has 8; leave model.size and model.n_head out"),
    ("model.n_embd=64", {}, None, "/config.json says n_embd=32, the model has 64"),
    ("model.n_layer=3", {}, None, "/config.json says n_layer=2, the model has 3"),
    ("model.size=350M", {}, None, "says n_head=4, the model has 16; leave model.size and"),
    ("model.vocab_size=300", {}, None, "says vocab_size=50257, the model has 300"),
    ("seed=1", {}, torch.zeros(50305, 32), r"wte.weight has \(50305, 32\), the model \(50304, 32\)"),
    ("model.n_embd=64", None, None, r"wte.weight has \(50257, 32\), the model \(50304, 64\).* and \d+ more"),
    ("model.n_layer=3", None, None, "h.2.ln_1.weight is missing"),
    ("seed=1", {"activation_function": "relu"}, None, "has activation_function=relu"),
    ("seed=1", {"architectures": ["MixtralForCausalLM"]}, None, "is MixtralForCausalLM; use model=transformers"),
]


@pytest.mark.parametrize("words, entries, embedding, says", DO_NOT_FIT)
def test_weights_that_do_not_fit_the_model_are_named_before_the_run(recipe, altered, words, entries, embedding, says):
    others = {} if embedding is None else {"transformer.wte.weight": embedding}
    folder = altered(lambda state: state.update(others), **entries or {})
    if entries is None:
        (folder / "config.json").unlink()
    with pytest.raises(UserError, match=says):
        prepare(config(*recipe, words, f"model.init_from='{folder}'"))


def test_fewer_words_than_gpt2s_cannot_be_grown(recipe):
    with pytest.raises(TrainingError, match="follow GPT-2's 50257 tokens, but model.vocab_size=1000 is less"):
        prepare(config(*recipe, EXTRA, "model.vocab_size=1000"))


def test_a_head_in_the_file_must_be_the_embedding_to_which_the_model_ties_it(recipe, altered, published):
    rows = rows_of(published)
    other = rows.clone()
    other[-1, -1] += 1e-3
    folder = altered(lambda state: state.update({"lm_head.weight": rows}))
    prepare(config(*recipe, f"model.init_from='{folder}'"))
    save_file(load_file(folder / "model.safetensors") | {"lm_head.weight": other}, folder / "model.safetensors")
    with pytest.raises(TrainingError, match="lm_head.weight differs from transformer.wte.weight"):
        prepare(config(*recipe, f"model.init_from='{folder}'"))


def test_a_folder_says_the_sizes_and_trained_weights_the_rate(text, published, tmp_path):
    """Nothing is typed but the folder: as model=llama has it."""
    cfg = config(*BARE, *text, f"model.init_from='{published}'", *NO_STEP[:1])
    assert (cfg.optim.lr, cfg.scheduler.warmup_ratio, cfg.recipe) == (2e-5, 0.05, "finetune")
    model = prepare(cfg).cfg.model
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 256, "vocab_size": 50304}
    assert model.size is None and {key: model[key] for key in sizes} == sizes
    lora = config(*BARE, *text, f"model.init_from='{published}'", "model.lora.rank=2")
    assert lora.optim.lr == 2e-4
    assert config(*BARE, *text, f"model.init_from='{published}'", "recipe=published").optim.lr == 6e-4


def test_a_folder_comes_out_with_the_words_that_it_had(text, published, tmp_path):
    line = [*BARE, *text, f"model.init_from='{published}'"]
    run(tmp_path / "run", *line, *NO_STEP)
    execute(config(*line, "mode=export", f"checkpoint='{tmp_path / 'run'}'"), tmp_path, None)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (published, tmp_path / "export"))
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}  # as published ones are
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["vocab_size"] == 50257


def test_a_folder_with_other_tokens_than_gpt2s_says_so_and_has_its_own(text, published, tmp_path):
    from tokenizer_folders import tokenizer_folder

    folder = tokenizer_folder(shutil.copytree(published, tmp_path / "german"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["id"] = 50300  # which is not a token of a run's own
    (folder / "tokenizer.json").write_text(json.dumps(content))
    line = [*BARE, *text, f"model.init_from='{folder}'"]
    with pytest.raises(UserError, match="tokenizer.json has other tokens than GPT-2's, which .*type data.tokenizer="):
        prepare(config(*line))
    assert "german" in prepare(config(*line, f"data.tokenizer='{folder}'")).data.description


@pytest.mark.parametrize(("theirs", "words", "rows"), [(1000, 900, 1000), (1000, 1003, 1003), (50259, 50257, 50304)])
def test_padding_takes_no_share_of_the_probabilities_of_a_small_vocabulary(text, altered, theirs, words, rows):
    folder = altered(vocab_size=theirs)
    model = to_dict(config(*BARE, *text, f"model.init_from='{folder}'").model)
    assert sizes_of(model, words)["vocab_size"] == rows


HUB = "some-people/Small-GPT2.1"


def hub(folder, monkeypatch, published=None):
    """The cache of the hub, as ``hf download`` fills it."""
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    if published is not None:
        repository = folder / "hub" / f"models--{HUB.replace('/', '--')}"
        shutil.copytree(published, repository / "snapshots" / "0123abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abc")


def test_a_name_of_the_hub_is_what_was_downloaded(text, published, tmp_path, monkeypatch):
    hub(tmp_path / "hf", monkeypatch, published)
    run(tmp_path / "run", *BARE, *text, f"model.init_from={HUB}", *NO_STEP)
    assert torch.equal(saved(tmp_path / "run", 1)[EMBEDDING][:50257], rows_of(published))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_name_that_was_not_downloaded_says_what_to_type(text, tmp_path, monkeypatch, model):
    hub(tmp_path / "hf", monkeypatch)
    says = f"{HUB} does not exist.*type hf download {HUB}, then the same command again"
    with pytest.raises(UserError, match=says):
        prepare(config(f"model={model}", *BARE[1:], *text, f"model.init_from={HUB}"))


def test_the_published_file_has_no_prefix(recipe, published, tmp_path):
    state = load_file(published / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    save_file({**bare, "h.0.attn.bias": mask}, tmp_path / "gpt2.safetensors")
    run(tmp_path / "run", *recipe, f"model.init_from='{tmp_path / 'gpt2.safetensors'}'", *NO_STEP)
    assert torch.equal(saved(tmp_path / "run", 1)["h.0.ln_1.weight"], bare["h.0.ln_1.weight"])


def test_what_holds_no_weights_is_refused_with_the_way_out(recipe, reference, tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "empty").mkdir()
    latest = (reference / "checkpoints" / "latest", "is a checkpoint: export it")
    for path, says in ((tmp_path, "is a pickle"), (tmp_path / "empty", "holds no model.safetensors"), latest):
        with pytest.raises(TrainingError, match=says):
            prepare(config(*recipe, f"model.init_from='{path}'"))


def test_any_model_with_a_vocabulary_grows_by_rows_that_are_the_mean_of_its_own(text, tmp_path):
    line = ["model=transformer", "model.d_model=16", "model.d_hid=16", "model.n_layer=1", *text, "optim.lr=0.5"]
    line += ["train.steps=2", "train.epochs=null", "train.eval_every=null", "train.global_batch_size=4"]
    run(tmp_path / "run", *line)
    execute(config(*line, "mode=export", f"checkpoint='{tmp_path / 'run'}'"), tmp_path, None)
    before = saved(tmp_path / "run", 2)
    words = len(before["encoder.embedding.weight"])
    start = [f"model.init_from='{tmp_path / 'export'}'", f"model.vocab_size={words + 5}", *NO_STEP]
    run(tmp_path / "again", *line, *start)
    after = saved(tmp_path / "again", 1)
    for name, tensor in before.items():
        grown = after[name][words:]
        assert torch.equal(after[name][: len(tensor)], tensor) and len(grown) == (5 if len(tensor) == words else 0)
        assert torch.allclose(grown, tensor.mean(dim=0).expand_as(grown), atol=1e-6)
    with pytest.raises(TrainingError, match="the data has .* tokens, model.vocab_size=.* is too few|does not fit"):
        prepare(config(*line, *start, f"model.vocab_size={words - 1}"))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", None])
def test_a_pipe_or_a_device_is_named_and_not_read(recipe, published, tmp_path, name):
    if name is None:
        path = folder = "/dev/zero"
    else:
        folder = shutil.copytree(published, tmp_path / "published")
        path = folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(TrainingError, match=f"{path} is a device, a pipe or a socket"):
        prepare(config(*recipe, f"model.init_from={folder}"))
