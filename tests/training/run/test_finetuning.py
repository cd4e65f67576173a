"""Folders of Hugging Face's, in and out; docs/finetuning.md and docs/transformers.md as they stand, on tiny models."""

import json
import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from commandline import ROOT, train
from composed import config, execute, losses, run, run_layout
from hugging_face import EXPERTS, make_folder, words
from safetensors.torch import load_file, save_file
from slow_cases import with_slow
from tokenizers import Tokenizer

from common.errors import UserError
from training.run.prepare import describe, prepare

pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
KEPT = ["train.epochs=null", "train.steps=1", "optim.lr=0", "train.precision=fp32", "train.eval_every=null"]
KINDS = {
    "llama, tied": {},
    "llama in parts": {"parts": "60KB"},
    "qwen2": {"kind": "Qwen2", "tie_word_embeddings": False},
    "qwen3": {"kind": "Qwen3", "head_dim": 16},
}
# Those of model=transformers. The files of the last three have other names or parts than the model.
OF_TRANSFORMERS = {
    "gemma2": {"kind": "Gemma2", "head_dim": 12, "sliding_window": 8},
    "mistral": {"kind": "Mistral", "sliding_window": 8, "tie_word_embeddings": False},
    "gpt_neox": {"kind": "GPTNeoX", "tie_word_embeddings": False},
    "qwen3_moe": {"kind": "Qwen3Moe", **EXPERTS},
    "mixtral": {"kind": "Mixtral", "parts": "60KB", **EXPERTS},
}


@pytest.fixture(scope="module")
def chats(rows, tmp_path_factory):
    """The same rows as chats."""
    folder = tmp_path_factory.mktemp("chats")
    for file in rows.glob("*.jsonl"):
        with open(folder / file.name, "w") as chats:
            for row in map(json.loads, file.read_text().splitlines()):
                said = zip(("user", "assistant"), (row["question"], row["answer"]), strict=True)
                chat = [{"role": role, "content": content} for role, content in said]
                chats.write(json.dumps({"messages": chat}) + "\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(name)``: the folder of a kind, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_folder(tmp_path_factory.mktemp("published"), **{**KINDS, **OF_TRANSFORMERS}[name])
        return made[name]

    return folder


def exported(run_dir, place, *more):
    execute(config("mode=export", f"checkpoint='{run_dir}'", *more), place, None)
    return place / "export"


SLOW = ("qwen2", "qwen3", "mistral", "mixtral")  # whose parts the others have


@pytest.mark.parametrize("kind", with_slow([*KINDS, *OF_TRANSFORMERS], SLOW))
def test_a_folder_comes_out_as_it_went_in_bit_for_bit(folders, rows, tmp_path, kind):
    folder, model = folders(kind), "transformers" if kind in OF_TRANSFORMERS else "llama"
    run(tmp_path / "run", *words(folder, rows, *KEPT, model=model))
    again = exported(tmp_path / "run", tmp_path, *words(folder, rows, model=model))
    theirs = {}
    for part in folder.glob("*.safetensors"):
        theirs |= load_file(part)
    ours = load_file(again / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    if kind == "qwen2":  # transformers would cut numbers otherwise than this tokenizer.json
        kept.remove("tokenizer_config.json")
        assert "as_it_is" in (again / "tokenizer_config.json").read_text()
    for name in kept:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, again))
    assert {k: before[k] for k in before.keys() & after.keys() if after[k] != before[k]} == {}
    assert before["architectures"] == after["architectures"]


@pytest.mark.parametrize("kind", with_slow(KINDS, SLOW))
def test_a_grown_tokenizer_grows_the_words_by_rows_that_are_the_mean_of_the_others(folders, rows, tmp_path, kind):
    folder = shutil.copytree(folders(kind), tmp_path / "grown")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<{i}>" for i in range(420 - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="the data has 420 tokens, model.vocab_size=416 is too few; set .*=420 or more"):
        prepare(config(*words(folder, rows)))
    with pytest.raises(
        UserError, match="rank=2: the rows of 4 new tokens would not be trained, because the data has 420"
    ):
        prepare(config(*words(folder, rows, "model.vocab_size=420", "model.lora.rank=2")))
    run(tmp_path / "run", *words(folder, rows, "model.vocab_size=420", *KEPT))
    exported(tmp_path / "run", tmp_path, *words(folder, rows, "model.vocab_size=420"))
    before, after = {}, load_file(tmp_path / "export" / "model.safetensors")
    for part in folder.glob("*.safetensors"):
        before |= load_file(part)
    for name, tensor in after.items():
        own = before[name]
        assert torch.equal(tensor[: len(own)], own) and len(tensor) - len(own) == (4 if len(own) == 416 else 0)
        assert torch.allclose(tensor[len(own) :], own.mean(dim=0).expand_as(tensor[len(own) :]), atol=1e-6)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["vocab_size"] == 420


def test_rows_as_chats_have_the_loss_of_rows_as_questions_and_answers(folders, rows, chats, tmp_path, capsys):
    folder, train = folders("qwen2"), ["train.epochs=null", "train.steps=4", "train.precision=fp32", "optim.lr=1e-2"]
    pairs = words(folder, rows, *train, "data.template=tokenizer")
    line = words(folder, chats, *train, "data.messages=messages", "data.field=text", "data.answer=null")
    for name, command in (("pairs", pairs), ("chats", line)):
        run(tmp_path / name, *command)
    assert losses(tmp_path / "chats") == pytest.approx(losses(tmp_path / "pairs"), rel=1e-7)
    ask = ["mode=sample", "sample.prompt='How many fruits?'", "sample.tokens=3", f"checkpoint='{tmp_path / 'chats'}'"]
    execute(config(*line, *ask), tmp_path, None)
    assert "<|im_start|>user\nHow many fruits?<|im_end|>\n<|im_start|>assistant\n" in capsys.readouterr().out


def test_stages_and_shares_start_from_the_same_folder_as_one_process(ranks, folders, rows, tmp_path):
    line = words(folders("llama in parts"), rows, *KEPT, "train.steps=3", "optim=sgd", "optim.lr=0.5")
    run(tmp_path / "single", *line, "parallel.chunks=4")
    for layout in ("pipe_ddp", "pipe_fsdp"):
        run_layout(ranks, layout, tmp_path / layout, *line)
        assert losses(tmp_path / layout) == pytest.approx(losses(tmp_path / "single"), rel=1e-5)


def test_a_checkpoint_says_its_sizes_without_the_config_json_of_the_folder(folders, rows, tmp_path):
    folder = make_folder(tmp_path / "published")
    run(tmp_path / "run", *words(folder, rows, *KEPT))
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    (tmp_path / "eval").mkdir()
    line = words(folder, rows, *SIZES)
    execute(config("mode=eval", f"checkpoint='{tmp_path / 'run'}'", *line), tmp_path / "eval", None)
    assert json.loads((tmp_path / "eval" / "summary.json").read_text())["test_loss"] > 0


SIZES = [
    "model.n_layer=4", "model.n_embd=48", "model.n_head=4", "model.kv_heads=2", "model.head_dim=12",
    "model.mlp_width=64", "model.vocab_size=416", "model.block_size=128", "model.rope_theta=1e4",
    "model.norm_eps=1e-6", "model.qkv_bias=false", "model.qk_norm=false", "model.tied=true", "model.init_std=0.1",
]  # fmt: skip


def test_the_path_of_the_weights_is_read_as_their_folder_is(folders, rows):
    folder = folders("llama, tied")
    setups = [prepare(config(*words(place, rows))) for place in (folder, folder / "model.safetensors")]
    whole, path = ({**setup.cfg.model, "init_from": None, "tokenizer": None} for setup in setups)
    assert whole == path and whole["size"] is None and whole["n_embd"] == 48
    assert setups[0].data.vocabulary.key == setups[1].data.vocabulary.key
    assert "no config.json" not in describe(setups[1])


def test_without_config_json_sizes_are_typed_and_the_plan_says_what_nothing_shows(folders, rows, tmp_path):
    folder = shutil.copytree(folders("llama, tied"), tmp_path / "bare")
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="model.size is not set, nor is model.n_embd, .*a folder with config.json"):
        prepare(config(*words(folder, rows)))
    plan = describe(prepare(config(*words(folder, rows, *SIZES))))
    assert f"warning: {folder} has no config.json" in plan
    assert "num_attention_heads=4, num_key_value_heads=2, head_dim=12, rope_theta=10000.0, rope_scaling=None" in plan


def test_rotations_in_the_file_that_are_not_the_models_are_an_error(folders, rows, tmp_path):
    folder = shutil.copytree(folders("llama, tied"), tmp_path / "old")
    turns = 1.0 / 10_000.0 ** (torch.arange(0, 12, 2) / 12)
    for scale, fits in ((1.0, True), (1.1, False)):
        state = {"model.layers.0.self_attn.rotary_emb.inv_freq": (turns**scale).half()}
        save_file(load_file(folder / "model.safetensors") | state, folder / "model.safetensors")
        with nullcontext() if fits else pytest.raises(UserError, match="inv_freq holds other numbers than the model"):
            prepare(config(*words(folder, rows)))


DO_NOT_FIT = [
    ("model.size=llama3.2-1B", "says hidden_size=48, the model has 2048; leave model.size and"),
    ("model.n_layer=5", "says num_hidden_layers=4, the model has 5"),
    ("model.vocab_size=300", "says vocab_size=416, the model has 300"),
    ("data.seq_len=500", "data.seq_len=500 is longer than the model's 128 positions"),
]


@pytest.mark.parametrize("word, says", DO_NOT_FIT)
def test_what_does_not_fit_the_folder_is_an_error_before_anything_starts(folders, rows, word, says):
    with pytest.raises(UserError, match=says):
        prepare(config(*words(folders("llama, tied"), rows, word)))


def test_a_part_that_is_missing_is_named(folders, rows, tmp_path):
    folder = make_folder(tmp_path / "published", parts="60KB")
    part = sorted(folder.glob("*.safetensors"))[1]
    part.unlink()
    with pytest.raises(UserError, match=f"{part.name} cannot be read as safetensors"):
        prepare(config(*words(folder, rows)))


def commands(page, tmp_path, **places):
    """The six commands of a page, with folders in the place of its words, and the run directory of each."""
    (tmp_path / "runs").mkdir()
    text = (ROOT / "docs" / page).read_text()
    for word, place in {**places, "runs/": f"{tmp_path}/runs/"}.items():
        text = text.replace(f"={word}", f"={place}").replace(f'"{word}', f'"{place}')
    found = re.findall(r"^    python train.py (.*)$", text.partition("```python")[0], flags=re.M)
    assert len(found) == 6
    lines = []
    for number, command in enumerate(found):
        line, where = shlex.split(command), tmp_path / "runs" / str(number)
        if line[-1].startswith("hydra.run.dir="):
            where = Path(line.pop().partition("=")[2])
        lines.append((line, where))
    return text, lines


def trained(line, where):
    run = train([*line, "device=cpu", "logger=none"], where)
    assert run.code == 0, run.console
    return run


@pytest.mark.slow
def test_the_page_leads_from_a_folder_to_a_folder(rows, folders, chats, tmp_path, capsys):
    """Its commands in their order, with few steps; then its program, whose last line is a difference of logits."""
    page, lines = commands("finetuning.md", tmp_path, FOLDER=folders("llama, tied"), GSM8K=rows, CHATS=chats)
    short = ["data.seq_len=64", "train.epochs=null", "train.steps=12", "optim.lr=0.02", "train.eval_every=null"]
    runs = []
    for line, where in lines:
        more = short if "data.root=" in " ".join(line) else ["sample.tokens=20"] * ("mode=sample" in line)
        runs.append(trained([*line, *more], where))
    assert all(run.losses[-1] < run.losses[0] - 0.1 for run in runs[:2])
    exec(compile(re.search(r"```python\n(.*?)```", page, flags=re.S)[1], "finetuning.md", "exec"), {})
    printed = capsys.readouterr().out.strip().splitlines()
    assert float(re.search(r"tensor\(([\d.e-]+)", printed[-1])[1]) < 1e-4, printed


@pytest.mark.slow
def test_the_page_of_transformers_runs_with_a_gemma_2(rows, tmp_path):
    folder = make_folder(tmp_path / "published", "Gemma2", head_dim=12)
    short = ["train.epochs=null", "train.steps=2", "train.global_batch_size=8", "train.eval_every=null"]
    more = {  # the logits of 50,257 tokens are 100 MB
        "data=jsonl": ["data.seq_len=64"], "mode=verify": ["verify.steps=1"],
        "model.config=": ["model.vocabulary=words", "data.max_vocabulary=416"],
    }  # fmt: skip
    for line, where in commands("transformers.md", tmp_path, FOLDER=folder, ROWS=rows)[1]:
        typed = " ".join(line)
        line += [] if "checkpoint=" in typed else [*short, f"data.cache_dir='{tmp_path / 'cache'}'"]
        trained([*line, *(word for key, words in more.items() if key in typed for word in words)], where)
