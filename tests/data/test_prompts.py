"""Rows of prompts and answers: whose tokens count, and chat templates beside transformers."""

import json
from datetime import date
from itertools import product

import numpy as np
import pytest
from tokenizer_folders import CHATML, LLAMA3, MARKED, REFUSING, tokenizer_folder

from common.errors import DataError
from data import prompts as prompts_module
from data.jsonl import Jsonl
from data.loader import TrainBatches
from data.vocabulary import END_OF_TEXT, gpt2

ROWS = [
    ("How many clips?", "48/2 = 24 clips.\n#### 24"),
    ("  Two\n\nlines \u00e9 ", "72"),
    ("What is <|im_end|>?", "A token, <think>\n\n as </s> is."),
    ("May?", "\n\n In May, with spaces"),
    ("<b> & 'it'", ""),
]
STYLES = {
    "ChatML": ("qwen", CHATML),
    "Llama 3": ("llama3", LLAMA3),
    "marked": ("qwen", MARKED),
    "Mistral": ("llama2", REFUSING),
}


@pytest.fixture
def rows_of(prepared, tmp_path):
    """Builds a data set of rows of questions and answers."""

    def build(rows=ROWS, **options):
        path = tmp_path / "rows.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
        return prepared(Jsonl, path, field="question", **{"answer": "answer", "seq_len": 160, **options})

    return build


def read(source) -> list[tuple[list[int], list[int]]]:
    """Each sample's inputs, without the padding, and the targets that count."""
    inputs, targets = source.read(np.arange(len(source)), 0)
    last = [max(np.flatnonzero(row != -100).tolist(), default=-1) for row in targets.numpy()]
    return [
        (row[: end + 1].tolist(), target[target != -100].tolist())
        for row, target, end in zip(inputs, targets, last, strict=True)
    ]


def test_only_the_answer_and_the_end_of_the_text_count(rows_of):
    for row, (inputs, counted) in zip(ROWS, read(rows_of().train), strict=True):
        prompt, answer = (gpt2().encode_ordinary(text) for text in (f"{row[0]}\n", row[1]))
        assert gpt2().decode([*inputs, END_OF_TEXT]) == "\n".join(row) + "<|endoftext|>"
        if not row[1].startswith("\n"):  # or one token is of both, and counts
            assert inputs == prompt + answer and counted == [*answer, END_OF_TEXT]


def test_a_prompt_may_have_several_fields(rows_of, tmp_path, prepared):
    (tmp_path / "more.jsonl").write_text('{"a": "one", "b": "two", "c": "three"}\n')
    ((inputs, counted),) = read(prepared(Jsonl, tmp_path / "more.jsonl", field=["a", "b"], answer="c", seq_len=9).train)
    assert gpt2().decode(inputs) == "one\ntwo\nthree" and gpt2().decode(counted) == "three<|endoftext|>"


PLACES = ["the settings", "several in the settings", "a file beside them", "the user's own"]


@pytest.mark.parametrize("style, where", [*((style, PLACES[0]) for style in STYLES), *product(["ChatML"], PLACES[1:])])
def test_templates_give_the_tokens_of_transformers_and_what_the_assistant_says_counts(
    rows_of, tmp_path, theirs, style, where
):
    style, template = STYLES[style]
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": template}]
    settings = {"the settings": template, "several in the settings": named}.get(where)
    folder, chosen = tokenizer_folder(tmp_path / "tokenizer", style, chat_template=settings), "tokenizer"
    if settings is None:
        path = folder / "chat_template.jinja" if where == "a file beside them" else tmp_path / "my.jinja"
        path.write_text(template)
        chosen = "tokenizer" if path.parent == folder else str(path)
    data, reference = rows_of(tokenizer=str(folder), template=chosen), theirs(folder)
    given = None if chosen == "tokenizer" else template
    for (question, answer), (inputs, counted) in zip(ROWS, read(data.train), strict=True):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        whole = reference.apply_chat_template(chat, chat_template=given, return_dict=False)
        start = reference.apply_chat_template(chat[:1], chat_template=given, add_generation_prompt=True, tokenize=False)
        answered = reference.apply_chat_template(chat, chat_template=given, tokenize=False).removeprefix(start)
        said = reference.decode(counted)
        if style == "llama2":  # whose decoder drops a space in front, and adds one behind a special token
            said, answered = said.replace(" ", ""), answered.replace(" ", "")
        assert [*inputs, counted[-1]] == whole
        assert said.endswith(answered) and len(counted) < len(whole)
        assert said == answered or answer.startswith("\n")
        assert data.encode_prompts([question])[0] == reference(start, add_special_tokens=False).input_ids


@pytest.mark.parametrize("template", [None, "tokenizer"])
def test_rows_of_similar_length_are_together_and_whole(rows_of, tmp_path, template):
    rows = [("many " * (i % 30), "words " * (i % 17)) for i in range(60)]
    folder = tokenizer_folder(tmp_path / "tokenizer", chat_template=CHATML)
    options = {"tokenizer": str(folder), "template": template, "seq_len": 512}
    plain, bucketed = (rows_of(rows, bucket_by_length=by_length, **options).train for by_length in (False, True))
    lengths = [len(inputs) for inputs, _ in read(plain)]
    assert bucketed.lengths(np.arange(len(plain))).tolist() == lengths
    batches = TrainBatches(bucketed, 4, 1)
    widths = {batches[step].inputs.shape[1] for step in range(1, batches.steps_per_epoch + 1)}
    assert len(widths) > 1 and max(widths) < 512
    other = rows_of(rows, bucket_by_length=True, **{**options, "answer": None, "template": None}).train
    assert other.lengths(np.arange(3)).tolist() != lengths[:3], "counted anew"


def test_of_a_row_that_is_cut_before_its_answer_nothing_counts(rows_of):
    assert read(rows_of([("many " * 20, "words")], seq_len=8).train) == [([], [])]


def test_a_row_without_an_answer_is_named(rows_of, tmp_path, prepared):
    (tmp_path / "some.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
    with pytest.raises(DataError, match=r"some.jsonl line 2: the field 'answer' \(data.field=.* is missing"):
        prepared(Jsonl, tmp_path / "some.jsonl", field="question", answer="answer")


REFUSED = {
    "that is missing": ("tokenizer", None, "data.template=tokenizer cannot be read .* have none.*Jinja file"),
    "that is no Jinja": ("{% if %}", None, "my.jinja cannot be read .*; give a Jinja file"),
    "of another type": ("tokenizer", 3, "data.template=tokenizer cannot be read .*; give a Jinja file"),
    "without a default": ("tokenizer", [{"name": "tool", "template": ""}], "cannot be read .'default'.*"),
    "that reaches out": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", None, "unsafe.*the row whose"),
    "that writes into what it is given": ("{{ messages.append(1) }}", None, "unsafe.*use another template"),
    "that raises": (REFUSING, None, "my.jinja: I know no such question, in the row whose prompt begins with 'unknown'"),
    "that begins otherwise": (
        "{{ messages | length }}", None,
        "writes '1' for the first 1 of 2 messages, and something else where all are written, in '2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("template, own, message", REFUSED.values(), ids=REFUSED)
def test_a_template_is_refused(rows_of, tmp_path, template, own, message):
    folder = tokenizer_folder(tmp_path / "tokenizer", "llama2", chat_template=own)
    if template != "tokenizer":
        (tmp_path / "my.jinja").write_text(template)
        template = str(tmp_path / "my.jinja")
    with pytest.raises(DataError, match=message):
        read(rows_of([("unknown", "x")], tokenizer=str(folder), template=template).train)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages[0].content if messages[0].content == 'a' }}", "it writes nothing"),
        ("{{ messages[0].content if messages[0].content == 'a' else 'x' * 10**10 }}", "it needs more than 1,024 MiB"),
    ],
)
def test_the_row_that_a_template_fails_on_is_named(rows_of, tmp_path, template, message, bucketed):
    (tmp_path / "my.jinja").write_text(template)
    where = "in the row whose prompt begins with 'this one'"
    with pytest.raises(DataError, match=f"rows.jsonl line 3: data.template=.*my.jinja: {message}.*, {where}"):
        rows = [("a", "b"), ("a", ""), ("this one", "c")]
        read(rows_of(rows, template=str(tmp_path / "my.jinja"), bucket_by_length=bucketed).train)


def test_a_template_that_writes_the_day_has_its_lengths_counted_anew_the_next_day(rows_of, tmp_path, monkeypatch):
    class Day(date):
        now = date(2026, 5, 9)

        @classmethod
        def today(cls):
            return cls.now

    monkeypatch.setattr(prompts_module, "date", Day)
    days = {"the day": "{{ 'x ' * (strftime_now('%d') | int) }}", "no day": ""}
    for name, text in days.items():
        (tmp_path / f"{name}.jinja").write_text(text + "{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [("many " * (i % 30), "words") for i in range(40)]
    for name in days:
        lengths = []
        for Day.now in (date(2026, 5, 9), date(2026, 11, 30)):
            options = {"template": str(tmp_path / f"{name}.jinja"), "seq_len": 512}
            lengths.append(rows_of(rows, bucket_by_length=True, **options).train.lengths(np.arange(9)).tolist())
            assert lengths[-1] == [len(inputs) for inputs, _ in read(rows_of(rows, **options).train)][:9]
        assert (lengths[0] == lengths[1]) == (name == "no day")


def test_a_template_needs_answers_and_a_file(rows_of):
    with pytest.raises(DataError, match="data.template=tokenizer needs prompts and answers; .*data.answer="):
        rows_of(template="tokenizer", answer=None)
    with pytest.raises(DataError, match="data.template=nowhere.jinja cannot be read .*give a Jinja file"):
        rows_of(template="nowhere.jinja")
    with pytest.raises(DataError, match="data.template=tokenizer cannot be read .*GPT-2 tokens have none"):
        rows_of(template="tokenizer")
