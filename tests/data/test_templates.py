"""Chat templates of others: what each row may take, and the process that renders them."""

import os
import resource
import signal
import time

import pytest
from slow_cases import slow

from common.errors import DataError
from data import templates
from data.templates import Chat, ChatTemplate

LONGER = "it takes more than 1 s of processor time"
LARGER = r"it needs more than 1,024 MiB of memory"
LONG = "it writes [0-9,]* characters, more than 1,00[0-9],..."
IMPATIENT = templates._START.replace("serve()", "serve.__globals__['_SECONDS'] = 1; serve()")
# Jinja computes what is constant while it reads a template; the length of messages is not.
ENDLESS = {
    "a repeated text": ("{{ 'x' * 10**10 }}", LARGER),
    "a list": ("{{ ([messages] * 10**10) | length }}", LARGER),
    "a width": ("{{ '%9999999999d' % messages | length }}", f"{LARGER}|too big|{LONG}"),
    "a filter": ("{{ messages[0].content | center(300000000) }}", f"{LARGER}|{LONG}"),
    "a text that is doubled": (
        "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        f"{LARGER}|{LONGER}",
    ),
    "a text": ("{{ 'x' * 2 * 10**6 }}", LONG),
    "a power": ("{{ (8 + messages | length) ** (10 ** 9) }}", f"{LONGER}|{LARGER}"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", LONGER),
    "itself": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "half of a character": (r"{{ '\ud83d' }}", "surrogates not allowed"),
}  # fmt: skip


def chat(text: str) -> ChatTemplate:
    return ChatTemplate(text, (("eos_token", "</s>"),), "2026-01-31")


def turns(*texts: str) -> Chat:
    return Chat([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)])


@pytest.mark.parametrize(
    "text, message", [slow(*case) if name == "a power" else case for name, case in ENDLESS.items()], ids=ENDLESS
)
def test_what_a_template_takes_is_limited(text, message, monkeypatch):
    monkeypatch.setattr(templates, "_SECONDS", 1)  # here, where a message says it, and where it is rendered
    monkeypatch.setattr(templates, "_START", IMPATIENT)
    with pytest.raises(DataError, match=message):
        chat(text).check()
        chat(text).render(turns("a question", "an answer"))
    whole = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    assert chat(whole).render(turns("a", "b")) == ("a</s>b</s>", [(5, 10)]), "the next one is rendered"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_a_long_row_may_be_long():
    text, whole = "many words " * 500_000, "{{ messages | map(attribute='content') | join('') }}"
    assert chat(whole).render(turns(text, "x")) == (f"{text}x", [(len(text), len(text) + 1)])


def test_a_template_that_reads_only_parts_of_text_gets_parts():
    """As those of vision models: such a template writes nothing of a message that is one text."""
    parts = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    text = (
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{parts}{{% endfor %}}"
        + "{{ '<assistant>' if add_generation_prompt }}"
    )
    assert chat(text).render(turns("a", "b")) == ("<user>a<assistant>b", [(18, 19)])


def test_one_process_renders_row_after_row_and_each_alike():
    template = chat("{{ messages[-1].content }}{{ range(10**4) | random }}{{ lipsum(n=1) }}{{ strftime_now('%F %H') }}")
    template.check()
    (before,) = templates._idle[template]
    prompt = template.render(turns("a"), continued=True)
    assert prompt == template.render(turns("a"), continued=True) and "2026-01-31 00" in prompt[0]
    assert templates._idle == {template: [before]}
    start = time.perf_counter()
    for _ in range(100):
        template.render(turns("a"), continued=True)
    assert time.perf_counter() - start < 10


def test_threads_and_forked_processes_have_processes_of_their_own(everywhere):
    template = chat("{{ messages[0].content }}")

    def right(name: object) -> bool:
        return all(template.render(turns(f"{name} {i}"))[0] == f"{name} {i}" for i in range(50))

    assert right("before")
    everywhere(right)


def test_signals_for_the_whole_group_leave_the_process_and_its_end_is_said():
    template = chat("{{ messages[0].content ~ '' }}")
    template.check()
    (process,) = templates._idle[template]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert template.render(turns("a")) == ("a", []) and templates._idle == {template: [process]}
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="the process that renders it has ended with code -9"):
        template.render(turns("a"))


def test_only_a_template_that_asks_for_the_day_depends_on_it():
    def keys(text: str) -> list[list[str]]:
        return [ChatTemplate(text, (), day).key for day in ("2026-01-31", "2026-02-01")]

    today, tomorrow = keys("{{ strftime_now('%d %b %Y') }}")
    assert today != tomorrow
    today, tomorrow = keys("{{ messages }}")
    assert today == tomorrow
