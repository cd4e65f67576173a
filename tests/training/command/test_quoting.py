"""Values that a user types in a shell, on their way through Hydra's grammar."""

import json
import shlex

import pytest
from composed import compose, config
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from conf.instantiate import instantiate, to_dict
from conf.words import hydra_word, quote_value, quoted


def seen(text):
    """What Hydra reads."""
    return OverridesParser.create().parse_override(f"key={text}").value()


TEXTS = ["", "a b", "it's", 'say "x"', "\\", "end\\", "\\'", "a\\\\'b", "f(x, [1]):", "{}", "=,", "a\\\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_through_quotes_unchanged(text):
    assert seen(quoted(text)) == text


@pytest.mark.parametrize("path", ["/runs/ä", "/home/josé/実験", "a/b_c.d:e%f@g+h-1", "~/runs", "a=b,c", "{x}"])
def test_a_path_that_is_printed_for_copying_can_be_typed(path):
    assert seen(hydra_word(path)) == path


def typed(line):
    """The arguments of a command line as a shell gives them, composed."""
    return compose(*map(quote_value, shlex.split(line)))


def test_extra_tokens_are_typed_as_json():
    cfg = typed("""model=gpt2 'model.extra_tokens={"<a>": "start of an \\"entity\\", it'"'"'s", "<b>": null}'""")
    assert json.loads(cfg.model.extra_tokens) == {"<a>": 'start of an "entity", it\'s', "<b>": None}
    assert cfg.data.extra_tokens == cfg.model.extra_tokens


@pytest.mark.parametrize("prompt", ["def f(x, y=1):", "Once upon a time", "it's {a: 1}", "[", "1", "null", "a,b", ""])
def test_a_prompt_is_any_text(prompt):
    assert typed(f"model=gpt2 {shlex.quote(f'sample.prompt={prompt}')}").sample.prompt == prompt


REFERENCES = ["${name}", "${oc.env:HOME}", "a ${", "\\\\${x}", "it's ${x} \\\\", "$${a${b}}"]


@pytest.mark.parametrize("prompt", REFERENCES)
def test_a_prompt_refers_to_nothing(prompt):
    for word in (f"sample.prompt={prompt}", f"++sample.prompt={prompt}", f"sample.prompts={json.dumps([prompt])}"):
        value = OverridesParser.create().parse_override(quote_value(word)).value()
        given = OmegaConf.to_container(OmegaConf.create({"given": value}), resolve=True)["given"]
        assert given in (prompt, [prompt]), word


def test_several_prompts_are_typed_as_json():
    prompts = ["def f(x, y=1):", "it's", 'say "x"', "a\nb", "[", ""]
    line = f"model=gpt2 {shlex.quote('sample.prompts=' + json.dumps(prompts))}"
    assert typed(line).sample.prompts == prompts


def test_what_is_quoted_for_hydra_already_stays():
    assert typed("""model=gpt2 "sample.prompt='a b'" """).sample.prompt == "a b"
    line = ["model=gpt2", "model.extra_tokens='{\"<a>\": null}'", "sample.prompt", "train.steps=3", "-m"]
    assert [*map(quote_value, line)] == line


def test_a_plain_mapping_works_as_well_where_its_words_are_plain():
    cfg = config("model=gpt2", "model.extra_tokens={entity_begins: start of it, entity_ends: null}")
    assert to_dict(cfg.data.extra_tokens) == {"entity_begins": "start of it", "entity_ends": None}
    assert instantiate(cfg.data).vocabulary.extra == ("entity_begins", "entity_ends")
