"""Rows as tokens: a text, or a prompt and its answer, optionally in a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from os.path import commonprefix

from common.errors import DataError
from common.files import expand_home
from data.templates import ChatTemplate
from data.vocabulary import Vocabulary


class RowProblem(DataError):
    """A row that cannot be encoded.

    Attributes:
        index: Its index among the given rows.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class RowTokens:
    """The conversion of rows to tokens, which are texts, or prompts with answers.

    Without a template, a newline after the prompt belongs to the prompt, and the end token to the answer. A template
    writes all special tokens itself, as in transformers.

    Attributes:
        parts: The fields of the text, or the fields of the prompt and that of the answer.
        key: Everything on which the tokens depend, except for the rows.
    """

    def __init__(self, vocabulary: Vocabulary, fields: Sequence[str], answer: str | None, template: str | None):
        """Read the template.

        Args:
            vocabulary: The tokens.
            fields: The fields of the text or the prompt, whose texts are joined by newlines.
            answer: The field of the answer; None for rows that are one text.
            template: "tokenizer" for the template of the tokenizer, or the path of a Jinja file; None for no template.

        Raises:
            DataError: If there is no such template, it is not Jinja, or ``answer`` is missing for it.
        """
        self.vocabulary, self.answers, self.named = vocabulary, answer is not None, f"data.template={template}"
        if template is not None and not self.answers:
            raise DataError(f"{self.named} needs prompts and answers; set data.answer= to the field of the answer")
        self.template = None if template is None else _read(self.named, template, vocabulary)
        self.parts = [list(fields), [answer]] if self.answers else [list(fields)]
        self.key = [*fields, answer or "", vocabulary.key, *(self.template.key if self.template is not None else ())]

    def encode(
        self,
        texts: Sequence[str],
        answers: Sequence[str] | None = None,
        most: int | None = None,
        threads: int = 1,
    ) -> list[tuple[list[int], int]]:
        """Return each row's tokens and how many of them are the prompt's, which do not count in the loss.

        Args:
            texts: The rows' texts, or their prompts.
            answers: Their answers, if they have any.
            most: The largest number of tokens for each row; None for all. Only so much of a long row is encoded.
            threads: The number of threads of the tokenizer.

        Raises:
            RowProblem: If the template cannot be rendered, a rendered row does not begin as its rendered prompt does,
                or it has no tokens.
        """
        if answers is None:
            return [([*tokens, self.vocabulary.end][:most], 0) for tokens in self._tokens(texts, most, threads)]
        rendered = [self._text(i, *row) for i, row in enumerate(zip(texts, answers, strict=True))]
        prompts = self._tokens([text[:prompt] for text, prompt in rendered], most, threads)
        rows = self._tokens([text for text, _ in rendered], most, threads)
        if self.template is None:
            rows = [[*tokens, self.vocabulary.end][:most] for tokens in rows]
        elif (empty := next((i for i, tokens in enumerate(rows) if not tokens), None)) is not None:
            raise self._problem(empty, "it writes nothing", texts[empty])
        # A token that has parts of both counts as the answer's.
        return [(tokens, len(commonprefix((prompt, tokens)))) for prompt, tokens in zip(prompts, rows, strict=True)]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens that a model continues: those of texts or, if rows have answers, of prompts."""
        return self._tokens([self._text(i, text)[0] for i, text in enumerate(texts)], most=None, threads=1)

    def _tokens(self, texts: Sequence[str], most: int | None, threads: int) -> list[list[int]]:
        rendered = self.template is not None
        begin = () if rendered else self.vocabulary.begin
        return [[*begin, *tokens] for tokens in self.vocabulary.first_tokens(texts, most, threads, rendered)]

    def _text(self, index: int, prompt: str, answer: str | None = None) -> tuple[str, int]:
        """Return a whole row as text and how many characters are before its answer; without an answer, only these."""
        if self.template is None:
            start = f"{prompt}\n" if self.answers else prompt
            return start + (answer or ""), len(start)
        try:
            return self.template.render(prompt, answer)
        except DataError as error:
            raise self._problem(index, str(error), prompt) from None

    def _problem(self, index: int, problem: str, prompt: str) -> RowProblem:
        where = f"the row whose prompt begins with {prompt[:60]!r}"
        return RowProblem(index, f"{self.named}: {problem}, in {where}; correct the row, or use another template")


def _read(named: str, template: str, vocabulary: Vocabulary) -> ChatTemplate:
    way_out = "give a Jinja file"
    try:
        text = vocabulary.chat_template if template == "tokenizer" else expand_home(template).read_text("utf-8")
        if isinstance(text, list):
            text = {entry["name"]: entry["template"] for entry in text}["default"]
        if text is None:
            raise LookupError(f"{vocabulary.label} have none")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(f"{named} cannot be read ({error}); {way_out}") from None
    read = ChatTemplate(text, tuple(vocabulary.special.items()), date.today().isoformat())
    try:
        read.check()
    except DataError as error:
        raise DataError(f"{named} cannot be read ({error}); {way_out}") from None
    return read
