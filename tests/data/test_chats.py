"""Rows of chats: whose tokens count, beside transformers' own mask, and what is refused before a run."""

import json

import numpy as np
import pytest
from tokenizer_folders import CHATML, LLAMA3, MARKED, tokenizer_folder

from common.errors import DataError
from data.jsonl import Jsonl
from data.parquet import Parquet

# Generation blocks where a template that goes message by message has its answers, so that transformers has a mask too.
ANSWER = "{% if message.role == 'assistant' %}{% generation %}WRITTEN{% endgeneration %}{% else %}WRITTEN{% endif %}"
CHATML_BLOCKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    + ANSWER.replace("WRITTEN", "{{ message.content + '<|im_end|>\\n' }}")
    + "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_BLOCKS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    + ANSWER.replace("WRITTEN", "{{ message.content | trim + '<|eot_id|>' }}")
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]


def say(*turns: str) -> list[dict]:
    """Messages of user and assistant in turns; the first is the system's if it begins with a hash."""
    roles = [*["system"] * turns[0].startswith("#"), *["user", "assistant"] * len(turns)]
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


CHATS = [
    say("How many clips?", "48/2 = 24 clips."),
    say(
        "#Be brief.", "Two\n\nlines \u00e9 ", "72", "And May?", "  In May,\n\n with spaces ", "Why?", "\U0001f600 漢字"
    ),
    say("What is <|im_end|>?", "A token, <think>\n\n as </s> is.", "<b> & 'it'", ""),
    [*say("1 + 2?", "I add."), {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}],
    [*say("a", "b"), *say("c", "d", "a question without an answer")],
]
TEMPLATES = {"ChatML": ("qwen", CHATML_BLOCKS), "Llama 3": ("llama3", LLAMA3_BLOCKS), "marked": ("qwen", MARKED)}


@pytest.fixture
def chats_of(prepared, tmp_path):
    """``chats_of(rows, style, template)``: a data set of rows, each the messages, or an object."""

    def build(rows, style="qwen", template=CHATML_BLOCKS, **options):
        rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folder = tokenizer_folder(tmp_path / "tokenizer", style, chat_template=template)
        options = {"messages": "messages", "seq_len": 400, "tokenizer": str(folder), **options}
        return prepared(Jsonl, tmp_path / "chat.jsonl", **options)

    return build


def rows_of(source) -> list[tuple[list[int], list[int]]]:
    """Each row's inputs and targets, of the same length."""
    return [
        (row.tolist(), target.tolist()) for row, target in zip(*source.read(np.arange(len(source)), 0), strict=True)
    ]


def check(data, tokenizer, chats, **more) -> None:
    """Compare each row, token by token, with transformers' tokens and mask."""
    for (inputs, targets), chat in zip(rows_of(data.train), chats, strict=True):
        both = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True, **more)
        tokens, mask = both["input_ids"], both["assistant_masks"]
        assert 0 < sum(mask) < len(tokens) <= len(inputs)
        assert inputs[: len(tokens) - 1] == tokens[:-1]
        wanted = [token if count else -100 for token, count in zip(tokens, mask, strict=True)]
        assert targets == wanted[1:] + [-100] * (len(targets) - len(tokens) + 1)


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "by prefix"])
@pytest.mark.parametrize("style, template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_token_of_every_row_counts_as_in_the_mask_of_transformers(
    chats_of, tmp_path, theirs, style, template, blocks
):
    """A template without blocks gives the same as with them, by what it writes up to each answer."""
    own = template if blocks else template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    check(chats_of(CHATS, style, own), theirs(tmp_path / "tokenizer"), CHATS, chat_template=template)


def test_the_thoughts_that_only_the_last_answer_has_count_there(chats_of):
    """As in Qwen3's template, which leaves out those of earlier answers, and so is no prefix of itself."""
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{{ '<think>' + m.thoughts + '</think>' if loop.last }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [{**message, "thoughts": "Hm."} for message in CHATS[1]]
    data = chats_of([chat], template=thinking)
    ((_, targets),) = rows_of(data.train)
    said = data.vocabulary.decode([token for token in targets if token != -100])
    first, second, last = (message["content"] for message in chat if message["role"] == "assistant")
    assert said == f"{first}<|im_end|>\n{second}<|im_end|>\n<think>Hm.</think>{last}<|im_end|>\n"


def test_tools_and_system_messages_reach_the_template(chats_of, tmp_path, theirs):
    rows = [{"messages": CHATS[i], "tools": tools} for i, tools in ((1, TOOLS), (3, json.dumps(TOOLS)), (0, None))]
    rows += [{"messages": CHATS[1], "tools": [json.dumps(tool) for tool in TOOLS]}]
    data, tokenizer = chats_of(rows), theirs(tmp_path / "tokenizer")
    for (inputs, _), row, tools in zip(rows_of(data.train), rows, (TOOLS, TOOLS, None, TOOLS), strict=True):
        whole = tokenizer.apply_chat_template(row["messages"], tools=tools, return_dict=True)["input_ids"]
        assert inputs[: len(whole) - 1] == whole[:-1]
        assert ("parameters" in data.vocabulary.decode(inputs)) == bool(tools)


def test_sharegpts_names_and_values_that_are_null_are_the_same_chat(chats_of):
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
    theirs = [[{"from": names[m["role"]], "value": m["content"]} for m in chat] for chat in CHATS]
    nulls = [[{**m, "name": None, "tool_calls": None} for m in chat] for chat in CHATS]
    wanted = rows_of(chats_of(CHATS).train)
    assert rows_of(chats_of(nulls).train) == wanted
    rows = [{"conversations": chat} for chat in theirs]
    assert rows_of(chats_of(rows, messages="conversations").train) == wanted


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["ChatML", "Llama 3"])
def test_two_messages_are_a_prompt_and_its_answer(chats_of, prepared, tmp_path, template):
    style = "qwen" if template is CHATML else "llama3"
    pairs = [say("How many clips?", "48/2"), say("  Two\n\nlines ", "\n\n72 \n"), say("May?", "")] * 9
    data = chats_of(pairs, style, template, bucket_by_length=True)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": user["content"], "a": answer["content"]}) + "\n" for user, answer in pairs)
    )
    options = {"field": "q", "answer": "a", "template": "tokenizer", "tokenizer": str(tmp_path / "tokenizer")}
    same = prepared(Jsonl, tmp_path / "rows.jsonl", bucket_by_length=True, seq_len=400, **options)
    assert rows_of(data.train) == rows_of(same.train) and rows_of(data.valid) == rows_of(same.valid)
    assert data.train.lengths(np.arange(20)).tolist() == same.train.lengths(np.arange(20)).tolist()
    assert data.encode_prompts(["How?"]) == same.encode_prompts(["How?"]), "mode=sample: a user's message"


@pytest.mark.parametrize("style, template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_may_be_the_json_of_several_messages(chats_of, tmp_path, theirs, style, template):
    data, tokenizer = chats_of(CHATS, style, template), theirs(tmp_path / "tokenizer")
    prompts = [CHATS[1][:count] for count in (2, 4, 6)] + [CHATS[0][:1]]
    wanted = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in prompts]
    assert data.encode_prompts([json.dumps(chat) for chat in prompts]) == wanted
    for text in ("[]", "[1]", "12"):
        assert text in data.vocabulary.decode(data.encode_prompts([text])[0]), "any other text is what a user says"
    with pytest.raises(DataError, match="sample.prompt: the chat has no content in message 2, of the role 'user'"):
        data.encode_prompts(['[{"role": "system", "content": "a"}, {"role": "user"}]'])


def test_parts_of_text_are_one_text_and_names_of_thoughts_are_transformers(chats_of, tmp_path, theirs):
    """A template of thoughts gets them under any of the names that transformers copies, and writes them once."""
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ (m.reasoning_content or '') + m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    parts = [[{**m, "content": [{"type": "text", "text": t} for t in m["content"].partition(" ")]} for m in chat]
             for chat in CHATS]  # fmt: skip
    assert rows_of(chats_of(parts).train) == rows_of(chats_of(CHATS).train)
    found = []
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = [{**m, name: "Hm. "} if m["role"] == "assistant" else m for m in CHATS[1]]
        data = chats_of([chat], template=thinking)
        check(data, theirs(tmp_path / "tokenizer"), [chat])
        found += rows_of(data.train)
    assert found == [found[0]] * 3 and "Hm. " in data.vocabulary.decode([t for t in found[0][1] if t != -100])


def test_the_plan_says_how_many_rows_are_cut_and_whose_messages_count(chats_of):
    whole = rows_of(chats_of(CHATS).train)
    lengths = sorted(max(i for i, target in enumerate(targets) if target != -100) + 1 for _, targets in whole)
    counted = "; messages that count: assistant (10); that do not: system (1), tool (1), user (10)"
    assert chats_of(CHATS, seq_len=400).description.endswith(f"padded to 400 tokens{counted}")
    noted = [[{**m, "weight": 0, "thinking": "Hm"} if m["role"] == "assistant" else m for m in chat] for chat in CHATS]
    ignored = "; not in the template: reasoning_content (10), weight (10)"
    assert chats_of(noted, seq_len=400).description.endswith(counted + ignored)
    result = [*CHATS[3][:2], {"role": "tool", "content": [1, 2]}, CHATS[3][3]]
    chats_of([result], template="{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    said = chats_of(CHATS, seq_len=24).description
    assert f"padded or cut to 24 tokens: {sum(n > 24 for n in lengths)} of 5 rows are longer" in said, (lengths, said)
    holds = int(said.partition("data.seq_len=")[2].split()[0])
    assert said.endswith(f"data.seq_len={holds} holds 95 % of them{counted}")
    assert "or cut" not in chats_of(CHATS, seq_len=holds).description
    assert f"cut to {holds - 1} tokens: 1 of 5 rows" in chats_of(CHATS, seq_len=holds - 1).description


def test_a_column_of_structs_is_a_chat_too(chats_of, prepared, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = chats_of([{"messages": chat, "tools": None} for chat in CHATS])
    for tools in ({}, {"tools": [json.dumps(TOOLS), *[None] * 4]}):
        parquet.write_table(pa.table({"chat": CHATS, "id": range(5), **tools}), tmp_path / "a.parquet")
        options = {"messages": "chat", "tokenizer": str(tmp_path / "tokenizer"), "seq_len": 400}
        rows = rows_of(prepared(Parquet, tmp_path / "a.parquet", **options).train)
        assert (rows == rows_of(data.train)) == (not tools) and rows[1:] == rows_of(data.train)[1:]
    for wrong, says in (
        ({"column": "chat"}, "'chat' is a chat: type data.messages=chat"),
        ({}, "'text' .data.column=. is missing; .*'chat' is a chat: type data.messages=chat"),
        ({"messages": "chats"}, "'chats' .data.messages=. is missing; .*'chat' is a chat: type data.messages=chat"),
        ({"messages": "id"}, "row 0 .from 0.: id is 0, not a list of messages"),
    ):
        with pytest.raises(DataError, match=says):
            prepared(Parquet, tmp_path / "a.parquet", **({"tokenizer": options["tokenizer"]} | wrong))


GOOD = {"messages": CHATS[0]}
REFUSED = {
    "the field missing": ({"chat": CHATS[0]}, {}, "'messages' .data.messages=. is missing; .*type data.messages=chat"),
    "no list": ({"messages": "hello"}, {}, """'messages' .data.messages=. is "hello", not a list of messages"""),
    "an empty list": ({"messages": []}, {}, r"is \[\], not a list of messages"),
    "no role": ({"messages": [{"text": "a"}]}, {}, "not a list of messages"),
    "a role that is no text": ({"messages": [{"role": 1, "content": "a"}]}, {}, "has no role in message 1"),
    "no content": ({"messages": [*CHATS[0], {"role": "user"}]}, {}, "has no content in message 3, of the role 'user'"),
    "a part that is no text": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, *CHATS[0][1:]]}, {},
        "has a part in message 1 that is not text",
    ),
    "tools that are no list": ({**GOOD, "tools": "3"}, {}, "comes with tools of type int"),
    "arguments that are written as Python does": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": True}}}]}]},
        {"template": "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or () %}"
         "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{% endfor %}"},
        "it writes the tool_calls of message 1 as Python writes a dict",
    ),
    "a role that nothing is written of": (
        {"messages": [*CHATS[0], {"role": "critic", "content": "no"}]},
        {"template": "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"},
        "it writes nothing of a message with the role 'critic'",
    ),
    "tools that nothing is written of": (
        {**GOOD, "tools": TOOLS}, {"template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        "it writes nothing of the tools of a row",
    ),
    "a role that the template refuses": (
        {"messages": [*CHATS[0], {"role": "critic", "content": "no"}]},
        {"template": "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('Roles must alternate') }}"
         "{% endif %}{{ m.content }}{% endfor %}"},
        "Roles must alternate, in the row whose prompt begins with 'How many clips",
    ),
    "an answer that is written otherwise once others follow": (
        {"messages": say("a", "b", "c", "d")},
        {"template": "{% for m in messages %}{{ m.role }}{{ m.content if m.role == 'user' or loop.last }}{% endfor %}"},
        "for the first 2 of 4 messages, and something else where all are written, .*has no {% generation %} blocks, "
        ".*use another template, data.template=FILE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row, more, says", REFUSED.values(), ids=REFUSED)
def test_a_row_that_cannot_be_read_as_a_chat_is_named_before_the_run(chats_of, row, more, says):
    with pytest.raises(DataError, match=f"chat.jsonl line 3: .*{says}"):
        chats_of([GOOD, GOOD, row, GOOD], **more)


def test_chats_of_which_nothing_would_count_are_refused(chats_of):
    bots = [[{"role": role, "content": "a"} for role in ("user", "bot")]] * 3
    with pytest.raises(DataError, match="nothing would count in the loss, because no row has .* the role assistant "
                       r".there are user, bot."):  # fmt: skip
        chats_of(bots)


def test_options_that_contradict_each_other_or_lack_a_template_say_what_to_type(chats_of, prepared, tmp_path):
    with pytest.raises(DataError, match="set data.answer=null for chats"):
        chats_of(CHATS, answer="answer")
    for tokenizer, whose in ((None, "GPT-2 tokens"), (str(tmp_path / "tokenizer"), "tokens of .*tokenizer.json")):
        if tokenizer:
            tokenizer_folder(tmp_path / "tokenizer", chat_template=None)
        says = (
            f".data.template=tokenizer. cannot be read .{whose} have none.; give a Jinja file, data.template=FILE, or"
        )
        with pytest.raises(DataError, match=f"data.messages=messages {says} a tokenizer .*, data.tokenizer=FOLDER"):
            prepared(Jsonl, tmp_path / "chat.jsonl", messages="messages", tokenizer=tokenizer)


def test_chats_without_the_key_say_which_to_type(chats_of, prepared, tmp_path):
    chats_of(CHATS)
    for options, problem in (({}, "'text' .data.field=. is missing"), ({"field": "messages"}, "is not a string")):
        with pytest.raises(
            DataError, match=f"line 1: .*{problem}.*; 'messages' is a chat: type data.messages=messages"
        ):
            prepared(Jsonl, tmp_path / "chat.jsonl", **options)


def test_gpt2s_tokens_have_chats_by_a_file(prepared, chats_of, tmp_path):
    chats_of(CHATS)
    (tmp_path / "my.jinja").write_text(CHATML_BLOCKS)
    options = {"messages": "messages", "template": str(tmp_path / "my.jinja"), "seq_len": 400}
    data = prepared(Jsonl, tmp_path / "chat.jsonl", **options)
    for (_, targets), chat in zip(rows_of(data.train), CHATS, strict=True):
        said = data.vocabulary.decode([token for token in targets if token != -100])
        assert said == "".join(f"{m['content']}<|im_end|>\n" for m in chat if m["role"] == "assistant")


@pytest.mark.parametrize("template", [CHATML_BLOCKS, CHATML], ids=["with blocks", "without"])
def test_a_pair_is_two_chats_of_which_only_what_follows_their_prompt_counts(chats_of, template):
    prompt, answers = say("#Be brief.", "1 + 1?", "2", "And 2 + 2?"), ["4", "five"]
    chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    whole = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    read, names = [], {"chosen": "chosen", "rejected": "rejected"}
    for row, messages in ((pair, "prompt"), (whole, "chosen")):
        data = chats_of([row] * 40, template=template, messages=messages, **names)
        inputs, targets = data.train.read(np.array([3]), 0)
        read.append((inputs.tolist(), targets.tolist()))
        counted = [data.vocabulary.decode(row[row != -100].tolist()) for row in targets[0]]
        assert inputs.shape == (1, 2, 400) and counted == [f"{answer}<|im_end|>\n" for answer in answers]
    assert read[0] == read[1]
    single = chats_of([prompt + chosen] * 40, template=template).train.read(np.array([3]), 0)[0]
    assert single[0].tolist() == read[0][0][0][0]
