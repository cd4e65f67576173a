"""Chat templates, which are rendered by a separate process with limited time and memory.

A template is a program that others have written. Jinja's sandbox protects files and Python's objects, but does not
prevent endless loops or gigabytes of text, which Jinja computes even while it reads a template such as
"{{ 'x' * 10**10 }}". A single operation of Python cannot be interrupted from inside a process, so the system limits it.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import date, datetime, time
from functools import cache
from os.path import commonprefix
from pathlib import Path
from time import process_time
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError

# The limits of a row: seconds of processor time, bytes of memory, and characters in addition to four for each of its
# own. A published template takes some 50 microseconds, and adds some hundred characters.
_SECONDS, _BYTES, _CHARACTERS = 3, 2**30, 1_000_000
_START = "import sys; sys.path[:] = sys.argv[1:]; from data.templates import serve; serve()"
_MESSAGE_CHARACTERS = 500


Span = tuple[int, float]  # the characters [start, end) of a text


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: Each with a "role", and most often with "content".
        tools: The JSON schemas of the functions that the assistant can call; None if there are none.
        prompt: The number of messages at the beginning of which none counts in the loss.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the values that it can read in addition to messages.

    Attributes:
        text: The Jinja text.
        special: The special tokens, as pairs of name and text.
        day: The day of ``strftime_now``, as 2026-01-31. The time is 00:00.
    """

    text: str
    special: tuple[tuple[str, str], ...]
    day: str

    @property
    def key(self) -> list[str]:
        """Everything on which the rendered texts depend."""
        # A template can only read the day by this function.
        return [self.text, json.dumps(dict(self.special)), *[self.day] * ("strftime_now" in self.text)]

    def check(self) -> bool:
        """Return whether it has generation blocks; raise DataError with the problem if the text is not a template."""
        return _ask(self, [])["has_blocks"]

    def render(self, chat: Chat, continued: bool = False) -> tuple[str, list[Span]]:
        """Return a chat as text, and the places in it of what the assistant writes, in ascending order.

        The places are those of the template's ``{% generation %}`` blocks, if it has any. Otherwise each begins where
        the messages before it end with the beginning of an answer, and ends where the messages up to it end.

        Args:
            chat: The messages and tools.
            continued: Whether the text ends where the assistant's next message begins, for a model to continue it.

        Raises:
            DataError: If it cannot be rendered, exceeds the limits of a row, leaves out a message or the tools, or has
                no generation blocks and does not begin as the messages before an answer do. The message describes the
                problem, but not the row.
        """
        done = _ask(self, [chat.messages, chat.tools, continued])
        return done["text"], [(start, end) for start, end in done["spans"]]


# -- in the process that sends requests ------------------------------------------------------------------------------

# The processes without a request, by their template. They end when their input is closed. A forked process starts its
# own. Threads use single operations of dict and list, because a lock might be held while another thread forks.
_idle: dict[ChatTemplate, list[subprocess.Popen]] = {}
os.register_at_fork(after_in_child=_idle.clear)


def _ask(template: ChatTemplate, request: Any) -> Any:
    """Send a request to a template's process and return the answer. Without one, end the process, raise DataError."""
    line = json.dumps(request, default=str).encode() + b"\n"  # Parquet has dates and decimals
    try:
        process = _idle[template].pop()
    except (KeyError, IndexError):
        process, line = _start(), json.dumps(astuple(template)).encode() + b"\n" + line
    assert process.stdin is not None and process.stdout is not None  # they are pipes
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline()
        read = json.loads(answer) if answer.endswith(b"\n") else {"problem": _end(process.wait())}
        if "problem" in read:
            raise DataError(read["problem"])
    except BaseException:  # such as Ctrl-C, after which the answer must not be used for another request
        process.kill()
        raise
    _idle.setdefault(template, []).append(process)
    return read


def _end(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it takes more than {_SECONDS} s of processor time"
    return f"the process that renders it has ended with code {code}"


def _start() -> subprocess.Popen:
    """Start a process that renders a template, and end the idle ones of other templates."""
    _idle.clear()
    # -S skips modules that an installation imports at each start, which may need more memory than is allowed.
    command = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parents[1]), *sys.path]
    try:
        # In another session, which Ctrl-C does not reach.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise DataError(f"the process that renders templates cannot be started: {error}") from error


# -- in the process that renders -------------------------------------------------------------------------------------


def serve() -> None:
    """Compile the template in the first line of the input, and render the row in each line after it, within limits.

    Each is answered by a line with a JSON object, which has the rendered text or a problem. An empty row asks whether
    the template has generation blocks.
    """
    # SLURM sends signals to every process of a job. This one ends with its input.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGXCPU})
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _BYTES)
    text, special, day = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        _limit(resource.RLIMIT_CPU, math.ceil(process_time()) + _SECONDS)
        try:
            most = _CHARACTERS + 4 * len(line)
            answer = json.dumps(_rendered(*_compiled(text, day), dict(special), most, json.loads(line)))
        except MemoryError:
            answer = json.dumps({"problem": f"it needs more than {_BYTES >> 20:,} MiB of memory"})
        except Exception as error:  # a template can raise any error
            answer = json.dumps({"problem": (str(error) or type(error).__name__)[:_MESSAGE_CHARACTERS]})
        print(answer, flush=True)


def _limit(kind: int, most: int) -> None:
    with suppress(ValueError, OSError):  # the system's own limit is lower; macOS does not limit memory
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


_seen = {"user", "assistant"}  # the roles of messages that the template writes, and "tools"


def _rendered(template: Template, marks: _Generation, special: dict[str, str], most: int, row: list) -> dict[str, Any]:
    if not row:
        return {"has_blocks": marks.has_blocks}
    (messages, tools, continued), in_parts = row, _takes_parts(template)

    def render(messages: list[dict], add_generation_prompt: bool = False, tools: list | None = tools) -> str:
        random.seed(0)  # for Jinja's lipsum() and random, so that a row is the same at each read
        marks.written, marks.spans = [], []
        options = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        if in_parts:
            messages = [{**message, "content": _parts(message.get("content"))} for message in messages]
        for part in template.generate(messages=messages, **options, **special):
            marks.written.append(part)
        text = "".join(marks.written)
        if len(text) > most:
            raise TemplateError(f"it writes {len(text):,} characters, more than {most:,}")
        text.encode()
        return text

    def longer(i: int, count: int) -> str:
        """Return the text of the first ``count`` messages with an x behind the content of message i."""
        message = {**messages[i], "content": f"{messages[i].get('content', '')}x"}
        return render([*messages[:i], message, *messages[i + 1 : count]], continued)

    def start_of(i: int) -> int:
        before = render(messages[:i], add_generation_prompt=True)
        if not text.startswith(before):
            raise differs(before, i)
        return len(before)

    def end_of(i: int) -> int:
        alone = render(messages[: i + 1])
        if text.startswith(alone):
            return len(alone)
        # Some templates write only the last answer with its thoughts. Then what follows its content ends an answer.
        after = alone[len(commonprefix((alone, longer(i, i + 1)))) :]
        content_end = len(commonprefix((text, longer(i, len(messages)))))
        if content_end == len(text) or not text.startswith(after, content_end):
            raise differs(alone, i + 1)
        return content_end + len(after)

    def differs(written: str, count: int) -> TemplateError:
        return TemplateError(
            f"it writes {written[-80:]!r} for the first {count} of {len(messages)} messages, and something else where "
            f"all are written, in {text[:300]!r}, and has no {{% generation %}} blocks"
        )

    text = render(messages, continued)
    spans = marks.spans
    for i, message in enumerate(messages):
        role = message["role"]
        for key, given in message.items():
            for value in _structures(given):
                if str(value) in text and str(value) != json.dumps(value, ensure_ascii=False):
                    kind = type(value).__name__
                    raise TemplateError(f"it writes the {key} of message {i + 1} as Python writes a {kind}")
        if role not in _seen and isinstance(message.get("content"), str) and "tool_calls" not in message:
            if longer(i, len(messages)) == text:
                raise TemplateError(f"it writes nothing of a message with the role {role!r}")
            _seen.add(role)
    if tools and "tools" not in _seen:
        if render(messages, continued, tools=None) == text:
            raise TemplateError("it writes nothing of the tools of a row")
        _seen.add("tools")
    if not marks.has_blocks and not continued:
        spans = [(start_of(i), end_of(i)) for i, message in enumerate(messages) if message["role"] == "assistant"]
    return {"text": text, "spans": spans}


def _structures(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _structures(part)


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@cache
def _takes_parts(template: Template) -> bool:
    """Return whether a template writes a text only if it is in a list of parts, as templates of vision models do."""

    def writes(content: Any) -> bool:
        with suppress(Exception):  # a template can raise any error
            return "probe" in template.render(messages=[{"role": "user", "content": content}])
        return False

    return not writes("probe") and writes(_parts("probe"))


class _Generation(Extension):
    """The block in which some templates put the text that the model is to write. Its places in a text are recorded.

    Attributes:
        has_blocks: Whether the template has such a block.
        written: The parts of a text before the block.
        spans: The places of blocks.
    """

    tags = {"generation"}
    has_blocks, written, spans = False, [], []

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the block, as a call of ``_record``."""
        line, self.has_blocks = next(parser.stream).lineno, True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        text, start = caller(), sum(map(len, self.written))
        self.spans.append((start, start + len(text)))
        return text


@cache
def _compiled(text: str, day: str) -> tuple[Template, _Generation]:
    """Return a chat template in a sandboxed environment like that of transformers, and its extension.

    Source: _compile_jinja_template in github.com/huggingface/transformers, utils/chat_template_utils.py.
    """

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    now = datetime.combine(date.fromisoformat(day), time())
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    marks: Any = environment.extensions[_Generation.identifier]
    return environment.from_string(text), marks
