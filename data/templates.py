"""Chat templates, which are rendered by a separate process with limited time and memory.

A template is a program that others have written. Jinja's sandbox protects files and Python's objects, but does not
prevent endless loops or gigabytes of text, which Jinja computes even while it reads a template such as
"{{ 'x' * 10**10 }}". A single operation of Python cannot be interrupted from inside a process, so the system limits it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import DataError

# The limits of a row: seconds of processor time, bytes of memory and characters, and how much of each is added for each
# of its own characters. A published template takes some 50 microseconds, and adds some hundred characters.
_SECONDS, _BYTES, _CHARACTERS = (3, 1e-6), (2**30, 64), (1_000_000, 4)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_START = "import sys; sys.path[:] = sys.argv[1:]; from data.templates import serve; serve()"
_MESSAGE_CHARACTERS = 500


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

    def check(self) -> None:
        """Raise DataError, which describes the problem, if the text is not a template."""
        _give_back(_take(self))

    def render(self, prompt: str, answer: str | None) -> tuple[str, int]:
        """Return a row as text, and how many characters of it are before the answer.

        Without an answer the text ends where a model continues it.

        Raises:
            DataError: If it cannot be rendered, exceeds the limits of a row, or does not begin as the prompt alone
                does. The message describes the problem, but not the row.
        """
        process = _take(self)
        done = process.ask([prompt, answer])
        _give_back(process)
        return done["text"], done["prompt"]


# -- in the process that sends requests ------------------------------------------------------------------------------

# Processes without a request, by the id of the process that has started them, so that a forked process starts its own.
# Threads take one by a single operation of the list, because a lock might be held while another thread forks.
_idle: dict[int, list[_Process]] = {}


class _Process:
    """A started process that renders one template, and is used by one thread at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        # Signals stay blocked in the process, since Ctrl-C reaches every process of the group. It ends with its input.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # -S skips modules that an installation imports at each start, which may need more memory than is allowed.
        command = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parents[1]), *sys.path]
        try:
            self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise DataError(f"the process that renders templates cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        self._given, self._got = process.stdin, process.stdout
        self.ask([template.text, dict(template.special), template.day])

    def ask(self, request: Any) -> Any:
        """Return the answer to a request. If there is none, end the process and raise DataError."""
        try:
            self._given.write(json.dumps(request).encode() + b"\n")
            self._given.flush()
            line = self._got.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # such as Ctrl-C, after which the answer must not be used for another request
            self.end()
            raise
        if line.endswith(b"\n"):
            answer = json.loads(line)
            if "problem" not in answer:
                return answer
            self.end()
            raise DataError(answer["problem"])
        code = self._process.wait()
        self.end()
        if code == -signal.SIGXCPU:
            raise DataError(f"it takes more than {_allowed(_SECONDS, request)} s of processor time")
        raise DataError(f"the process that renders it has ended with code {code}")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._given, self._got):
            with suppress(OSError):
                stream.close()


def _take(template: ChatTemplate) -> _Process:
    """Return a process that renders a template, and end idle processes of other templates."""
    waiting = _idle.setdefault(os.getpid(), [])
    while waiting:
        with suppress(IndexError):  # another thread has taken it
            process = waiting.pop()
            if process.template == template:
                return process
            process.end()
    return _Process(template)


def _give_back(process: _Process) -> None:
    _idle.setdefault(os.getpid(), []).append(process)


@atexit.register
def _end_all() -> None:
    for process in _idle.pop(os.getpid(), []):
        process.end()


# -- in the process that renders -------------------------------------------------------------------------------------


def serve() -> None:
    """Compile the template in the first line of the input, and render the row in each line after it.

    Each line is answered by a line with a JSON object, which has the rendered text or a problem.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = text, special, day = json.loads(sys.stdin.buffer.readline())
    _answer(given, lambda: _compiled(text, day) and {})
    for line in sys.stdin.buffer:
        row = json.loads(line)
        _answer(row, lambda row=row: _rendered(_compiled(text, day), special, *row))


def _allowed(limit: tuple[int, float], request: Sequence[Any]) -> int:
    """Return the limit of a resource for a request, by the size of its texts."""
    return limit[0] + int(limit[1] * sum(len(text) for text in request if isinstance(text, str)))


def _answer(request: Sequence[Any], work: Callable[[], dict[str, Any]]) -> None:
    """Write the result of ``work`` for a request, which is computed within the limits."""
    memory = _allowed(_BYTES, request)
    _limit(resource.RLIMIT_CPU, math.ceil(process_time()) + _allowed(_SECONDS, request))
    _limit(resource.RLIMIT_AS, memory)
    random.seed(0)  # for Jinja's lipsum() and random, so that a row is the same at each read
    try:
        answer = json.dumps(work())
    except MemoryError:
        answer = json.dumps({"problem": f"it needs more than {memory >> 20:,} MiB of memory"})
    except Exception as error:  # a template can raise any error
        answer = json.dumps({"problem": (str(error) or type(error).__name__)[:_MESSAGE_CHARACTERS]})
    _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)  # for the next row
    sys.stdout.buffer.write(answer.encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    with suppress(ValueError, OSError):  # macOS does not limit memory
        resource.setrlimit(kind, (most, hard))


def _rendered(template: Template, special: dict[str, str], prompt: str, answer: str | None) -> dict[str, Any]:
    most = _allowed(_CHARACTERS, [prompt, answer])

    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        options = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        text = template.render(messages=messages, **options, **special)
        if len(text) > most:
            raise TemplateError(f"it writes {len(text):,} characters, more than {most:,}")
        text.encode()
        return text

    user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    start = render([user], add_generation_prompt=True)
    if answer is None:
        return {"text": start, "prompt": len(start)}
    whole = render([user, assistant], add_generation_prompt=False)
    if not whole.startswith(start):
        raise TemplateError(
            f"it writes {start[-80:]!r} for a prompt alone, and something else before its answer, in {whole[:300]!r}"
        )
    return {"text": whole, "prompt": len(start)}


class _Generation(Extension):
    """The block in which some templates put the text that the model is to write."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the block."""
        next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@cache
def _compiled(text: str, day: str) -> Template:
    """Return a chat template in a sandboxed environment like that of transformers.

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
    return environment.from_string(text)
