"""Rows as tokens: texts, prompts and their answers, or chats. A chat template writes chats, and can write prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np

from common.errors import DataError
from common.files import expand_home
from data.templates import Chat, ChatTemplate, Span
from data.vocabulary import HALF_CHARACTER, Vocabulary

# A chat; a prompt and its answer; or a text.
Row = Chat | Sequence[str]
Pair = tuple[Row, Row]  # the same prompt with its chosen and with its rejected answer
# ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant"}
# The keys under which a message has thoughts. Templates read the first one; gpt-oss's reads the second.
# Source: _REASONING_FIELDS in github.com/huggingface/transformers, utils/chat_template_utils.py (5.24).
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class RowProblem(DataError):
    """A row that cannot be encoded.

    Attributes:
        index: Its index among the given rows.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def is_chat(given: Any) -> bool:
    """Return whether a value is a list of messages, each an object with a role."""
    listed = isinstance(given, list) and bool(given)
    return listed and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in given)


def chat_of(messages: Any, tools: Any = None, prompt: int = 0) -> Chat:
    """Return the chat in the values of a row, in the form of ``role`` and ``content``; ShareGPT's has other names.

    Keys without a value are left out and thoughts are copied, as transformers does. Parts of text are joined.

    Raises:
        ValueError: If it is no chat. The message describes what it is.
    """
    if not is_chat(messages):
        shown = json.dumps(messages, ensure_ascii=False, default=str)[:60]
        raise ValueError(f'is {shown}, not a list of messages, [{{"role": "user", "content": "…"}}, …]')
    read = []
    for number, given in enumerate(messages, 1):
        message = {key: value for key, value in given.items() if value is not None}
        if "role" not in message and "from" in message:
            role = message.pop("from")
            message = {"role": _ROLES.get(str(role), role), "content": message.pop("value", None), **message}
        if not isinstance(message.get("role"), str):
            raise ValueError(f"has no role in message {number}")
        if message.get("content") is None and "tool_calls" not in message:
            raise ValueError(f"has no content in message {number}, of the role {message['role']!r}")
        if isinstance(parts := message.get("content"), list) and (message["role"] != "tool" or _has_types(parts)):
            message["content"] = "".join(_part(part, number) for part in parts)
        thoughts = next((message[key] for key in THOUGHTS if key in message), None)
        read.append(message if thoughts is None else {THOUGHTS[1]: thoughts, **message, THOUGHTS[0]: thoughts})
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"comes with tools of type {type(tools).__name__}, not a list of JSON schemas")
    return Chat(read, [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or ()] or None, prompt)


def _has_types(parts: list) -> bool:
    return any(isinstance(part, dict) and "type" in part for part in parts)  # otherwise a tool's result is a list


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    shown = json.dumps(part, ensure_ascii=False, default=str)[:60]
    raise ValueError(f'has a part in message {number} that is not text, {{"type": "text", "text": "…"}}, but {shown}')


class RowTokens:
    """The conversion of rows to tokens, which are texts, prompts with answers, or chats.

    Without a template, a newline after the prompt belongs to the prompt, and the end token to the answer. A template
    writes all special tokens itself, as in transformers.

    Attributes:
        fields: The fields that are read of each row.
        messages: The field of the chat; None if rows are no chats.
        pairs: Whether rows are pairs of answers. Each is converted to two rows (``take``).
        key: Everything that determines the tokens, except for the rows.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        fields: Sequence[str],
        answer: str | None = None,
        template: str | None = None,
        messages: str | None = None,
        chosen: str | None = None,
        rejected: str | None = None,
    ):
        """Read the template.

        Args:
            vocabulary: The tokens.
            fields: The fields of the text or the prompt. Their texts are joined by newlines.
            answer: The field of the answer; None for rows that are one text.
            template: "tokenizer" for the template of the tokenizer, or the path of a Jinja file; None for no template,
                or for chats the tokenizer's.
            messages: The field of the chat, in place of the text and the answer.
            chosen: The field of the better one of two answers to a prompt; None for rows that are no pairs. With
                ``messages``, which is the chat before the answers, both are lists of messages. If they are whole chats,
                ``messages`` is the same field as ``chosen``, and their prompt is the messages in which both agree.
            rejected: The field of the other answer.

        Raises:
            DataError: If there is no such template, it is not Jinja, ``answer`` is missing for it, or fields do not go
                together.
        """
        answers = [name for name in (answer, chosen, rejected) if name is not None]
        self.pairs = chosen is not None
        if self.pairs == (rejected is None) or (self.pairs and (answer is not None or chosen == rejected)):
            raise DataError(
                f"data.answer={answer}, data.chosen={chosen} and data.rejected={rejected}: rows have one answer, or a "
                "chosen and a rejected one; set data.answer, or the other two"
            )
        self.vocabulary, self.messages, self.answers = vocabulary, messages, answer is not None or self.pairs
        self.named = f"data.template={template}"
        if messages is not None and answer is not None:
            raise DataError(
                f"data.messages={messages} and data.answer={answer}: rows are chats, or prompts and answers; set "
                "data.answer=null for chats"
            )
        if messages is not None and template is None:
            template, self.named = "tokenizer", f"data.messages={messages} (data.template=tokenizer)"
        if template is not None and not self.answers and messages is None:
            raise DataError(
                f"{self.named} needs prompts and answers; set data.answer= to the field of the answer, or "
                "data.messages= to that of chats"
            )
        self.template = None if template is None else _read(self.named, template, vocabulary)
        if self.template is not None and template != "tokenizer":
            vocabulary.template = self.template.text
        self._overlap_only = self.template is not None and self.template.check()
        self._parts = [list(fields), *([name] for name in answers)]
        texts = [field for part in self._parts for field in part]
        self.fields = texts if messages is None else list(dict.fromkeys([messages, *answers]))
        self.key = [*fields, answer or "", vocabulary.key, *(self.template.key if self.template is not None else ())]
        self.key += [] if messages is None else ["messages", messages]
        self.key += ["pairs", *answers] if self.pairs else []

    @property
    def answered(self) -> bool:
        """Whether rows have answers: those to prompts, or of the assistant in chats."""
        return self.answers or self.messages is not None

    def take(self, values: Mapping[str, Any]) -> Row | Pair:
        """Return the row, or pair, with these values of ``fields``, and with the tools of a chat.

        Raises:
            ValueError: If they are no chat, or not text. The message describes what they are.
        """
        if self.messages is not None and self.pairs:
            return _pair_of([values[name] for name in self.fields], values.get("tools"))
        if self.messages is not None:
            return chat_of(values[self.messages], values.get("tools"))
        try:
            texts = ["\n".join([values[field] for field in part]) for part in self._parts]
            "".join(texts).encode()  # JSON can write half a character
        except (TypeError, UnicodeEncodeError):
            raise ValueError(_no_text(values, self.fields)) from None
        return ([texts[0], texts[1]], [texts[0], texts[2]]) if self.pairs else texts

    def encode(
        self, rows: Sequence[Row], most: int | None = None, threads: int = 1
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return each row's tokens and which of them count in the loss, bool.

        Args:
            rows: The rows, as ``take`` returns them.
            most: The largest number of tokens for each row; None for all. Only so much of a long row is encoded.
            threads: The number of threads of the tokenizer.

        Raises:
            RowProblem: If the template cannot be rendered, leaves out a part of a row, or does not write it in the
                order of the messages, or a row has no tokens.
        """
        texts = self.render(rows)
        if self.template is None and not self.answers:
            encoded = self._tokens([text for text, _ in texts], most, threads)
            cut = [[*tokens, self.vocabulary.end][:most] for tokens in encoded]
            return [(tokens, np.ones(len(tokens), bool)) for tokens in cut]
        placed = self._tokens([text for text, _ in texts], most, threads, placed=True)
        if self.template is None:
            end = (self.vocabulary.end, (inf, inf))
            placed = [[*tokens, end][:most] for tokens in placed]
        elif (empty := next((i for i, tokens in enumerate(placed) if not tokens), None)) is not None:
            raise self._problem(empty, "it writes nothing", _chat(rows[empty]))
        return [
            ([token for token, _ in tokens], self._counted([place for _, place in tokens], spans))
            for tokens, (_, spans) in zip(placed, texts, strict=True)
        ]

    def render(self, rows: Sequence[Row]) -> list[tuple[str, list[Span]]]:
        """Return each row's text, and the places in it of what counts. Raises RowProblem, as ``encode``."""
        return [self._text(i, row) for i, row in enumerate(rows)]

    def counts(self, chat: Chat, role: str) -> bool:
        """Return whether the messages of a role in a chat count in the loss."""
        if role == "assistant" or self.template is None or not self._overlap_only:
            return role == "assistant"
        more = [{**m, "content": f"{m.get('content', '')}x"} if m["role"] == role else m for m in chat.messages]
        both = [self.template.render(Chat(messages, chat.tools))[1] for messages in (chat.messages, more)]
        return len({sum(end - start for start, end in spans) for spans in both}) > 1

    def reads(self, *keys: str) -> bool:
        """Return whether the template names one of these keys of messages."""
        return self.template is not None and any(key in self.template.text for key in keys)

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens that a model continues: those of texts, of prompts, or of chats.

        With a template, a text is what a user says, or the JSON of messages. Raises DataError, as ``encode``.
        """
        rows: list[Row] = [[text] if self.template is None else _said(text) for text in texts]
        return self._tokens([self._text(i, row, continued=True)[0] for i, row in enumerate(rows)], None, 1)

    def _tokens(self, texts: Sequence[str], most: int | None, threads: int, placed: bool = False) -> list[list]:
        rendered = self.template is not None
        begin: list = [] if rendered else [(token, (0, 0)) if placed else token for token in self.vocabulary.begin]
        how = {"threads": threads, "rendered": rendered, "placed": placed}
        return [[*begin, *tokens] for tokens in self.vocabulary.first_tokens(texts, most, **how)]

    def _counted(self, places: list[tuple[int, float]], spans: list[Span]) -> np.ndarray:
        """Return which tokens have characters in a span. A token that has parts of both counts."""
        counted = np.zeros(len(places), bool)
        starts, ends = np.array(places, dtype=float).reshape(-1, 2).T
        for start, end in spans:
            # Tokens of white space have no characters in some tokenizers. The last one of a span counts, but in
            # transformers, where generation blocks say what counts, it does not.
            counted |= (ends > start) & ((starts < end) | ((ends == end) & (not self._overlap_only)))
        return counted

    def _text(self, index: int, row: Row, continued: bool = False) -> tuple[str, list[Span]]:
        """Return a row as text and the places of what counts; with ``continued``, only the text before the answer."""
        if self.template is None:
            assert not isinstance(row, Chat)  # a chat has a template
            prompt, *answer = row
            start = f"{prompt}\n" if self.answers else prompt
            return "".join([start, *answer]), [(len(start), inf)]
        chat = _chat(row)
        try:
            text, spans = self.template.render(chat, continued)
            counted = sum(message["role"] == "assistant" for message in chat.messages[chat.prompt :])
            return text, spans[-counted or len(spans) :] if chat.prompt else spans
        except DataError as error:
            raise self._problem(index, str(error), chat) from None

    def _problem(self, index: int, problem: str, chat: Chat) -> RowProblem:
        first = next((m for m in chat.messages if m["role"] == "user"), chat.messages[0])
        where = f"the row whose prompt begins with {str(first.get('content'))[:60]!r}"
        return RowProblem(
            index, f"{self.named}: {problem}, in {where}; correct the row, or use another template, data.template=FILE"
        )


def _no_text(values: Mapping[str, Any], fields: Sequence[str]) -> str:
    for field in fields:
        if not isinstance(values[field], str):
            return f"the field {field!r} is not a string but of type {type(values[field]).__name__}"
    field, half = next((field, half) for field in fields if (half := HALF_CHARACTER.search(values[field])))
    return (
        f"the field {field!r} holds {half[0]!r} at character {half.start() + 1}, half of a character (a lone "
        "surrogate), which is not text and has no tokens"
    )


def _pair_of(chats: Sequence[Any], tools: Any) -> Pair:
    """Return the chats of a pair, from the prompt and two answers, or from two whole chats. Raises ValueError."""
    for given in chats:
        chat_of(given)
    *given, chosen, rejected = chats
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    prompt = given[0] if given else [message for message, _ in same]
    one, other = ([*prompt, *answer[0 if given else len(prompt) :]] for answer in (chosen, rejected))
    return chat_of(one, tools, len(prompt)), chat_of(other, tools, len(prompt))


def _chat(row: Row) -> Chat:
    """Return a chat; of a prompt and its answer, what the user and the assistant say."""
    if isinstance(row, Chat):
        return row
    return Chat([{"role": role, "content": text} for role, text in zip(("user", "assistant"), row, strict=False)])


def _said(text: str) -> Row:
    """Return the chat in a text that is JSON; any other text as a prompt."""
    try:
        messages = json.loads(text)
    except ValueError:
        return [text]
    try:
        return chat_of(messages) if is_chat(messages) else [text]
    except ValueError as error:
        raise DataError(f"sample.prompt: the chat {error}") from None


def _read(named: str, template: str, vocabulary: Vocabulary) -> ChatTemplate:
    way_out = "give a Jinja file, data.template=FILE, or a tokenizer with a template, data.tokenizer=FOLDER"
    try:
        text = vocabulary.chat_template if template == "tokenizer" else expand_home(template).read_text("utf-8")
        if isinstance(text, list):
            text = {entry["name"]: entry["template"] for entry in text}["default"]
        if text is None:
            raise LookupError(f"{vocabulary.label} have none")
        read = ChatTemplate(text, tuple(vocabulary.special.items()), date.today().isoformat())
        read.check()
    except (OSError, ValueError, TypeError, LookupError, DataError) as error:
        raise DataError(f"{named} cannot be read ({error}); {way_out}") from None
    return read
