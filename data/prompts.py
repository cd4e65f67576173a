"""Rows as tokens: a text, or a prompt and its answer, in a chat template where there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from os.path import commonprefix
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError
from common.files import expand_home
from data.vocabulary import Vocabulary


class RowTokens:
    """How the text of a row becomes tokens, or its prompt and its answer.

    Without a template, a newline behind the prompt belongs to it, and the end token to the answer. A template brings
    all special tokens itself, as in transformers.

    Attributes:
        parts: The fields of the text, or those of the prompt and that of the answer.
        key: What the tokens depend on, besides rows.
    """

    def __init__(self, vocabulary: Vocabulary, fields: Sequence[str], answer: str | None, template: str | None):
        """Read the template.

        Args:
            vocabulary: The tokens.
            fields: Of the text or the prompt, joined by newlines.
            answer: The field of the answer; None for rows that are one text.
            template: "tokenizer" for the one that the vocabulary brings, or the path of a Jinja file; None for none.

        Raises:
            DataError: There is no such template, it is not Jinja, or there is no answer for it.
        """
        self.vocabulary, self.answers, self.named = vocabulary, answer is not None, f"data.template={template}"
        if template is not None and not self.answers:
            raise DataError(f"{self.named} is for prompts and answers: name the field of the answer, data.answer=")
        self.template = None if template is None else _read(self.named, template, vocabulary)
        self.parts = [list(fields), [answer]] if self.answers else [list(fields)]
        self.key = [*fields, answer or "", vocabulary.key, self.template or "", json.dumps(vocabulary.special)]

    def encode(
        self, texts: Sequence[str], answers: Sequence[str] | None = None, threads: int = 1
    ) -> list[tuple[list[int], int]]:
        """Return each row's tokens and how many of them are the prompt's, which do not count in the loss.

        Raises:
            DataError: The template cannot be rendered, or the whole of a row does not begin as its prompt does.
        """
        prompts, end = self.prompts(texts, threads), [self.vocabulary.end] if self.template is None else []
        if answers is None:
            return [([*tokens, *end], 0) for tokens in prompts]
        rows = self._tokens([self._text(*row) for row in zip(texts, answers, strict=True)], threads)
        # A token of both is the answer's.
        counts = [len(commonprefix(pair)) for pair in zip(prompts, rows, strict=True)]
        return [([*tokens, *end], count) for tokens, count in zip(rows, counts, strict=True)]

    def prompts(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return the tokens that a model continues: those of texts or, where rows have answers, of prompts."""
        return self._tokens([self._text(text) for text in texts], threads)

    def _tokens(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        if self.template is None:
            return self.vocabulary.encode_texts(texts, threads)
        return self.vocabulary.tokens(texts, threads, rendered=True)

    def _text(self, prompt: str, answer: str | None = None) -> str:
        """Return a whole row as text or, without an answer, what is before it."""
        if self.template is None:
            return f"{prompt}\n{answer or ''}" if self.answers else prompt
        user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
        start = self._render([user], add_generation_prompt=True)
        if answer is None:
            return start
        whole = self._render([user, assistant], add_generation_prompt=False)
        if not whole.startswith(start):
            raise DataError(
                f"{self.named} writes {start[-80:]!r} for a prompt alone, and something else before its answer, in "
                f"{whole[:300]!r}; give a template that only adds the answer"
            )
        return whole

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        special = self.vocabulary.special
        try:
            return _compiled(self.template).render(messages=messages, tools=None, documents=None, **options, **special)
        except Exception as error:  # whatever the template does
            where = f"the row whose prompt begins with {messages[0]['content'][:60]!r}"
            raise DataError(f"{self.named}: {error}, in {where}; correct the row, or use another template") from None


def _read(named: str, template: str, vocabulary: Vocabulary) -> str:
    try:
        text = vocabulary.chat_template if template == "tokenizer" else expand_home(template).read_text("utf-8")
        if isinstance(text, list):
            text = {one["name"]: one["template"] for one in text}["default"]
        if text is None:
            raise LookupError(f"{vocabulary.label} come without one")
        _compiled(text)
    except (OSError, ValueError, TypeError, LookupError, TemplateError) as error:
        raise DataError(f"{named} cannot be read ({error}); give a Jinja file") from None
    return text


class _Generation(Extension):
    """The block in which some templates put what the model is to write."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the block."""
        next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@cache
def _compiled(text: str) -> Template:
    """Return a chat template in the environment that transformers has for it, sandboxed.

    Source: _compile_jinja_template in github.com/huggingface/transformers, utils/chat_template_utils.py.
    """

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return environment.from_string(text)
