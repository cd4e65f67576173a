"""Text in the tokens of a Hugging Face tokenizer."""

import json
import random

import pytest
from interpreters import python
from tokenizer_folders import STYLES, TEXT, tokenizer_folder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from common.errors import DataError
from data import vocabulary as vocabulary_module
from data.jsonl import Jsonl
from data.text import Text
from data.vocabulary import GPT2Vocabulary, HuggingFaceVocabulary
from training.export.write import keep_tokens

# With a line end at every place where a long text is cut into pieces.
LONG = "".join(f"Natalia sold {i} clips,  and that's all.\n{'  ' * (i % 3)}It's (here);\n\n" for i in range(4000))
TEXTS = {
    "words": "The answer: 72.", "nothing": "", "spaces": " two  spaces \n\n", "other letters": "é漢\x00",
    "special tokens": "<|im_start|>a<unk>b<think>", "long": LONG[:9000],
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_have_the_tokens_of_transformers_and_come_back(tmp_path, theirs, style, text):
    vocabulary, reference = HuggingFaceVocabulary(tokenizer_folder(tmp_path, style)), theirs(tmp_path)
    wanted = reference(text).input_ids
    for threads in (1, 2):
        assert vocabulary.encode_texts([text, "x"], threads) == [wanted, reference("x").input_ids]
    assert vocabulary.decode(wanted) == reference.decode(wanted)
    assert vocabulary.size == len(reference) and vocabulary.end == reference.eos_token_id
    begins = {"qwen": [], "llama3": ["<|begin_of_text|>"], "llama2": ["<s>"]}[style]
    assert vocabulary.begin == reference.convert_tokens_to_ids(begins)


@pytest.mark.parametrize("style", STYLES)  # Llama 2's begins each text that it is given with a space
def test_a_document_is_cut_nowhere_and_has_one_beginning_and_one_end(tmp_path, theirs, prepared, style):
    folder = tokenizer_folder(tmp_path / "tokenizer", style)
    (tmp_path / "text").mkdir()
    texts = [LONG if i == 5 else f"Document {i}\n" for i in range(20)]
    for i, text in enumerate(texts):
        (tmp_path / "text" / f"{i:02}.txt").write_text(text)
    data = prepared(Text, tmp_path / "text", seq_len=16, tokenizer=str(folder))
    reference = theirs(folder)
    wanted = [reference(text).input_ids + [reference.eos_token_id] for i, text in enumerate(texts) if i not in (9, 19)]
    assert len(LONG) > 2 * (1 << 16)
    assert data.train.tokens.tolist() == [token for tokens in wanted for token in tokens]
    assert (data.vocab_size, data.seq_len) == (len(reference), 16)
    assert f"tokens of {folder / 'tokenizer.json'}" in data.description


ONLY_NAMED = {  # special tokens that tokenizer.json lacks
    "the end": {"eos_token": "<|new|>", "pad_token": "<pad>"},
    "a word of the vocabulary": {"eos_token": "clips"},
    "with how it is cut out": {
        "eos_token": "<|new|>",
        "added_tokens_decoder": {
            "400": {"content": "<|new|>", "special": True, "normalized": False},
            "331": {"content": "<y>", "special": False, "rstrip": True},
        },
    },
    "further ones": {"extra_special_tokens": ["<|e2|>", "<|e1|>"]},
    "older further ones": {"additional_special_tokens": ["<|e2|>", "<|e1|>"]},
    "with names": {"image_token": "<|e2|>", "extra_special_tokens": {"audio_token": "<|e1|>"}},
}


@pytest.mark.parametrize("settings", ONLY_NAMED.values(), ids=ONLY_NAMED)
def test_special_tokens_that_only_the_settings_name_are_those_of_transformers(tmp_path, theirs, settings):
    vocabulary, reference = HuggingFaceVocabulary(tokenizer_folder(tmp_path, **settings)), theirs(tmp_path)
    text = "a<|new|> <pad>b<y> clips<|e1|>c<|e2|> d<|im_end|>"
    assert vocabulary.encode_texts([text]) == [reference(text).input_ids]
    assert vocabulary.size == len(reference) > 312 and vocabulary.end == reference.eos_token_id
    assert vocabulary.key != HuggingFaceVocabulary(tokenizer_folder(tmp_path / "other")).key
    assert vocabulary.warning is None


REPLACED = {  # by transformers: the kind of model, and the class that tokenizer_config.json names
    "qwen's way to split words": ("llama3", "qwen2", "PreTrainedTokenizerFast", "café", True),
    "llama's way to begin a text": ("llama2", "llama", "LlamaTokenizer", " a", False),
    "gemma's": ("llama2", "gemma2", "GemmaTokenizer", "a b", False),
    "special tokens, which it splits": ("qwen", "gpt2", "PreTrainedTokenizerFast", "<|im_end|>a", False),
    "nothing": ("llama3", "llama", "LlamaTokenizer", None, False),
}


@pytest.mark.parametrize("style, kind, named, text, in_module", REPLACED.values(), ids=REPLACED)
def test_transformers_reads_the_tokenizer_of_an_export_as_it_was_trained_with(
    tmp_path, theirs, style, kind, named, text, in_module
):
    tokenizer_folder(tmp_path, style, tokenizer_class=named, split_special_tokens=str(text).startswith("<"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    vocabulary, before = HuggingFaceVocabulary(tmp_path), theirs(tmp_path)
    said = keep_tokens(tmp_path, vocabulary)
    if text is None:
        assert said == "" and vocabulary.warning is None
        return
    text = text.replace("é", "e\u0301")
    (own,) = vocabulary.encode_texts([text])
    assert f"tokenizer_config.json names PreTrainedTokenizerFast{' in as_it_is.py' * in_module}, because" in said
    assert before(text).input_ids != own and repr(text) in said
    for trust in (None, True):
        assert theirs(tmp_path, trust_remote_code=trust)(text).input_ids == own
    assert (tmp_path / "as_it_is.py").exists() == in_module


def test_a_folder_that_transformers_reads_otherwise_is_named_with_what_the_run_uses(tmp_path, theirs):
    tokenizer_folder(tmp_path, "llama2", tokenizer_class="LlamaTokenizer")
    vocabulary, read = HuggingFaceVocabulary(tmp_path), theirs(tmp_path)(" a").input_ids
    assert vocabulary.warning == (
        f"the tokens are those that {tmp_path}/tokenizer.json describes, but ' a' is {read} by transformers' "
        f"AutoTokenizer, and {vocabulary.encode_texts([' a'])[0]} here"
    )


ENDS = {
    "a string": ({"tokenizer_config.json": {"eos_token": "!"}}, "!"),
    "an object": ({"tokenizer_config.json": {"eos_token": {"content": "!", "lstrip": False}}}, "!"),
    "in a map of its own": ({"special_tokens_map.json": {"eos_token": {"content": "!"}}}, "!"),
    "a map beside settings": (  # as transformers reads both
        {"tokenizer_config.json": {"eos_token": "?"}, "special_tokens_map.json": {"eos_token": "!"}}, "!"
    ),
    "a map beside newer settings": (
        {
            "tokenizer_config.json": {"eos_token": "!", "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": "?"},
        },
        "!",
    ),
    "a number": ({"generation_config.json": {"eos_token_id": 0}, "config.json": {"eos_token_id": 1}}, "!"),
    "the first of several": ({"config.json": {"eos_token_id": [0, 1]}}, "!"),
    "a new token": ({"tokenizer_config.json": {"eos_token": "new"}, "config.json": {"eos_token_id": 0}}, "new"),
    "after one that is no token": (
        {"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 0}}, "!"
    ),
}  # fmt: skip


@pytest.mark.parametrize("files, end", ENDS.values(), ids=ENDS)
def test_what_ends_a_text_is_what_the_files_beside_the_tokenizer_say(tmp_path, files, end):
    tokenizer_folder(tmp_path)
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    vocabulary = HuggingFaceVocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.decode([vocabulary.end]) == end


PIECES = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n", "\u00a0", "\u2003", "\x85", "\x1c", "Natalia", "sold", "clips", "'s",
    "'", "don't", ".", "...", "!?", "(", "48/2", "1234567", "é", "e\u0301", "\u0301", "漢字", "字。", "😀", "\ufb01",
    "``", "<|im_start|>", "<think>", "<|endoftext|>", "</s>", "The answer is", "_x",
]  # fmt: skip
VOCABULARIES = {
    "GPT-2": lambda folder: GPT2Vocabulary({"<a>": None}),
    "BPE in bytes": lambda folder: HuggingFaceVocabulary(tokenizer_folder(folder, "qwen")),
    "GPT-2 as tokenizers reads it": lambda folder: HuggingFaceVocabulary(gpt2_folder(folder)),
    "pieces of Unigram": lambda folder: HuggingFaceVocabulary(unigram_folder(folder)),
}
ACROSS_WORDS = {
    "a token with a space inside": lambda folder: GPT2Vocabulary({"sold clips": None}),
    "BPE across words": lambda folder: HuggingFaceVocabulary(tokenizer_folder(folder, "llama2")),
}


def gpt2_folder(folder):
    folder.mkdir()
    for name, content in GPT2Vocabulary().files(1024).items():
        (folder / name).write_text(content)
    return folder


def unigram_folder(folder):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>"}
    tokenizer.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=200, show_progress=False, **special))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def random_text(draw: random.Random, pieces: int) -> str:
    return "".join(draw.choice(PIECES) + draw.choice(["", " "]) for _ in range(pieces))


@pytest.mark.slow
@pytest.mark.parametrize("build", VOCABULARIES.values(), ids=VOCABULARIES)
def test_where_a_long_text_is_cut_no_token_changes(tmp_path, build):
    vocabulary, draw, places = build(tmp_path / "tokenizer"), random.Random(1), 0
    assert vocabulary.can_be_cut
    for _ in range(60):
        text = random_text(draw, 60)
        (whole,) = vocabulary.tokens([text], rendered=True)
        parts = [text[: cut.start()] for cut in vocabulary_module._CUT.finditer(text)]
        for part, tokens in zip(parts, vocabulary.tokens(parts, rendered=True), strict=True):
            assert tokens == whole[: len(tokens)], part
        places += len(parts)
    assert places > 900


@pytest.mark.parametrize("build", [*VOCABULARIES.values(), *ACROSS_WORDS.values()], ids=[*VOCABULARIES, *ACROSS_WORDS])
def test_the_first_tokens_are_those_of_the_whole_text(tmp_path, monkeypatch, build):
    monkeypatch.setattr(vocabulary_module, "_CHARACTERS_A_TOKEN", 1)
    monkeypatch.setattr(vocabulary_module, "_TOKENS_MORE", 0)
    vocabulary, draw = build(tmp_path / "tokenizer"), random.Random(2)
    texts = ["", "a", "x" * 500, *(random_text(draw, n) for n in range(1, 200, 7))]
    whole = vocabulary.tokens(texts, rendered=True)
    for most in (1, 2, 7, 50):
        assert vocabulary.first_tokens(texts, most, rendered=True) == [tokens[:most] for tokens in whole]
    assert vocabulary.first_tokens(texts, None, rendered=True) == whole
    assert vocabulary.can_be_cut == (build in VOCABULARIES.values())


def test_a_vocabulary_with_gaps_is_as_large_as_its_last_token_says(tmp_path):
    tokenizer_folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["zzz"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert HuggingFaceVocabulary(tmp_path).size == 1001


EMPTY = Tokenizer(models.BPE())  # as transformers writes GPT2Tokenizer(vocab_file=…)
EMPTY.add_special_tokens(["<|im_end|>"])
EMPTY = EMPTY.to_str()
REFUSED = {
    "not JSON": ("tokenizer.json", "{", "tokenizer.json cannot be read as a tokenizer"),
    "another JSON": ("tokenizer.json", "[1]", "tokenizer.json cannot be read as a tokenizer"),
    "other settings": ("tokenizer_config.json", "[1, 2]", "tokenizer_config.json is not a JSON object"),
    "no token of text": ("tokenizer.json", EMPTY, "has no token of text, but [0-9]* special ones"),
    "no token": ("tokenizer.json", Tokenizer(models.BPE()).to_str(), "has no token of text, but [0-9]* special ones"),
    "no end": ("tokenizer_config.json", "{}", "the token that ends a text.*eos_token"),
}


@pytest.mark.parametrize("name, content, message", REFUSED.values(), ids=REFUSED)
def test_what_is_no_tokenizer_is_an_error_that_names_the_file(tmp_path, name, content, message):
    (tokenizer_folder(tmp_path) / name).write_text(content)
    with pytest.raises(DataError, match=message):
        Jsonl(root="rows.jsonl", tokenizer=str(tmp_path))


def test_only_one_vocabulary_can_be_asked_for(tmp_path):
    folder = str(tokenizer_folder(tmp_path))
    with pytest.raises(DataError, match="grows GPT-2's vocabulary, but data.tokenizer=.* has its own. Leave out one"):
        Text(root="text", tokenizer=folder, extra_tokens={"<a>": None})
    with pytest.raises(DataError, match="Use data.vocabulary=gpt2, or leave out the other two"):
        Text(root="text", tokenizer=folder, vocabulary="words")


READ = """
import sys
from data.jsonl import Jsonl
from data.loader import TrainBatches, train_loader
data = Jsonl(root=sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3], seq_len=8, bucket_by_length=True)
data.prepare()
data.vocabulary.encode_texts(["The answer is 72."] * 100, threads=2)
print(sum(1 for _ in train_loader(TrainBatches(data.train, 4, 1), 1, 8, num_workers=2)))
"""


def test_processes_that_read_ahead_use_it_without_a_warning(tmp_path):
    folder, rows = tokenizer_folder(tmp_path / "tokenizer"), tmp_path / "rows.jsonl"
    rows.write_text('{"text": "The answer is 72."}\n' * 60)
    done = python("-c", READ, rows, folder, tmp_path / "cache")
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")
