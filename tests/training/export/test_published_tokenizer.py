"""A run on rows of prompts and answers in a published tokenizer's tokens: trained, sampled from and exported."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from composed import config, execute, records, run, run_layout
from tokenizer_folders import tokenizer_folder

from common.errors import DataError, TrainingError
from training.export import write
from training.run.prepare import describe, prepare

ROWS = [(f"What is {i} + {i}?", f"It is {2 * i}.") for i in range(40)]


def test_a_padding_token_that_the_data_does_not_have_is_left_out(tmp_path, monkeypatch):
    """Its number would be none of the embedding's, which transformers refuses."""
    monkeypatch.setattr(write, "tokenizer", lambda data, chain: {})
    for pad, written in ((20, None), (9, 9)):
        config = {"vocab_size": 10, "pad_token_id": pad}
        export = lambda state, words, c=config: (state, dict(c))  # noqa: E731
        chain = SimpleNamespace(hugging_face=SimpleNamespace(export=export, optional=""))
        strategy = SimpleNamespace(chain=chain, state_dict=lambda: {"w": torch.zeros(1)})
        write.write_weights(tmp_path, SimpleNamespace(vocab_size=10, vocabulary=None), strategy)
        assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == written


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "llama3", eos_token="<|end_of_text|>")


@pytest.fixture(scope="module")
def line(folder, tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in ROWS))
    sizes = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.vocab_size=384"]
    data = ["data=jsonl", f"data.root='{rows}'", "data.field=q", "data.answer=a", "data.template=tokenizer"]
    data += [f"data.tokenizer='{folder}'", "data.seq_len=96"]
    return [*sizes, *data, "train.global_batch_size=4", "train.precision=fp32", "train.eval_every=null"]


@pytest.fixture(scope="module")
def trained(line, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    run(run_dir, *line, "train.steps=3")
    return run_dir


def test_a_prompt_is_continued_in_its_template(line, trained, tmp_path, capsys):
    ask = ["mode=sample", f"checkpoint='{trained}'", "sample.prompt='What is 1 + 1?'", "sample.tokens=4"]
    execute(config(*line, *ask), tmp_path, None)
    said = capsys.readouterr().out
    assert said.startswith("<|begin_of_text|><|start_header_id|>system")
    assert "What is 1 + 1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n" in said
    execute(config(*line, *ask, "data.template=null", "data.answer=null"), tmp_path, None)
    assert capsys.readouterr().out.startswith("<|begin_of_text|>What is 1 + 1?")


def test_the_exported_folder_has_the_tokenizer_byte_for_byte_and_transformers_reads_it(line, trained, folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason="a test dependency (requirements-dev.txt)")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    execute(config(*line, "mode=export", f"checkpoint='{trained}'", "export_to=out"), tmp_path, None)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(place) for place in (tmp_path / "out", folder))
    assert ours("It is 24.").input_ids == theirs("It is 24.").input_ids
    assert ours.chat_template == theirs.chat_template and ours.eos_token == "<|end_of_text|>"
    for name in ("config.json", "generation_config.json"):  # where a generated text ends
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == theirs.eos_token_id


def test_an_export_has_the_template_that_it_was_trained_with(line, trained, tmp_path):
    transformers = pytest.importorskip("transformers", reason="a test dependency (requirements-dev.txt)")
    (tmp_path / "mine.jinja").write_text("{% for message in messages %}{{ message.content }}!{% endfor %}")
    words = [*line, "data.template=" + f"'{tmp_path}/mine.jinja'", "mode=export", f"checkpoint='{trained}'"]
    execute(config(*words, "export_to=out"), tmp_path, None)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"


def test_the_plan_says_that_transformers_reads_other_tokens(line, tmp_path):
    folder = tokenizer_folder(tmp_path / "tokens", "llama2", tokenizer_class="LlamaTokenizer")
    plan = describe(prepare(config(*line, f"data.tokenizer='{folder}'")))
    assert f"warning: the tokens are those that {folder}/tokenizer.json describes, but ' a' is" in plan


def test_rows_that_are_all_cut_before_their_answers_end_the_run_with_the_reason(line, tmp_path):
    for most, said in ((10, "no step counted: .* of all 4 steps"), (2, "no target counts for 3 steps in a row")):
        with pytest.raises(TrainingError, match=f"{said}.*answers lie beyond data.seq_len; raise data.seq_len"):
            run(tmp_path / f"run-{most}", *line, "data.seq_len=8", "train.steps=4", f"train.max_skipped={most}")


@pytest.fixture
def some_cut(line, tmp_path):
    """Rows of which every fourth has an answer within data.seq_len; those to validate and to test on have none."""
    rows = [("a" if i % 4 == 1 and i % 20 not in (9, 19) else "many " * 60, "b") for i in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))
    return [*line, f"data.root='{tmp_path}/rows.jsonl'", "data.template=null", "data.seq_len=32"]


def test_steps_in_which_no_target_counts_are_skipped_and_the_first_row_says_nothing_of_the_others(
    some_cut, tmp_path, ranks, capsys
):
    task = [*some_cut, "train.steps=8", "train.max_skipped=7"]
    summary = run(tmp_path / "run", *task)
    steps = records(tmp_path / "run")
    empty = [record["step"] for record in steps if record["skipped"]]
    assert 0 < len(empty) == summary["skipped_steps"] < 8
    assert all((record["loss"] is None) == record["skipped"] for record in steps)
    assert math.isfinite(summary["first_loss"]) and math.isfinite(summary["final_loss"])
    said = [line for line in capsys.readouterr().err.splitlines() if "is skipped" in line]
    assert len(said) == 1 and said[0].startswith(f"step {empty[0]} is skipped: no target counts: ")
    layout = records(run_layout(ranks, "pipe_ddp", tmp_path / "layout", *task))
    assert [record["step"] for record in layout if record["skipped"]] == empty
    assert [r["loss"] for r in layout if r["loss"]] == pytest.approx([r["loss"] for r in steps if r["loss"]], rel=1e-5)


def test_an_evaluation_in_which_no_target_counts_has_no_loss_and_says_why(some_cut, tmp_path, capsys):
    early = ["train.eval_every=1", "+callbacks.stop._target_=training.callbacks.early_stop.EarlyStop"]
    summary = run(tmp_path / "run", *some_cut, *early, "+callbacks.stop.patience=1", "train.steps=3")
    assert (summary["steps"], summary["best_val_loss"], summary["test_loss"]) == (3, None, None)
    assert all("val_loss" not in record for record in records(tmp_path / "run"))
    said = capsys.readouterr().err
    assert said.count("warning: no target of this evaluation counts, so it has no loss: ") == 4
    assert "nan" not in said and "optim.lr" not in said


def test_a_tokenizer_that_is_gone_is_an_error_that_names_it(line, trained, folder, tmp_path):
    moved = [f"data.tokenizer='{tmp_path / 'gone'}'"]
    with pytest.raises(DataError, match="gone.* does not exist; data.tokenizer="):
        execute(config(*line, *moved, "mode=sample", f"checkpoint='{trained}'"), tmp_path, None)
    shutil.copytree(folder, tmp_path / "gone")
    execute(config(*line, *moved, "mode=sample", f"checkpoint='{trained}'", "sample.tokens=1"), tmp_path, None)
