"""Drawn at random, always the same: what is read either makes sense or is refused with an error for the user."""

import json
import struct
from contextlib import suppress

import numpy as np
from files import MANIFEST
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.errors import CheckpointError, DataError
from data.jsonl import Rows
from data.prompts import RowTokens
from data.tokens import read_header
from data.vocabulary import GPT2Vocabulary
from training.checkpoint.files import Checkpoint, with_checksum

BOUNDED = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # without shrinking, which takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WHOLE_NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-3, 130) | st.sampled_from([0, -1, 1, 2**31, 2**63])
NUMBERS = WHOLE_NUMBERS | st.floats() | st.just(1e308)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = ("format", "step", "seed", "optimizer", "layout", "tied", "loss_scale", "progress", "files")


@BOUNDED
@given(st.dictionaries(st.sampled_from(ENTRIES), JSON), st.booleans())
def test_manifests(tmp_path, changes, sealed):
    whole = {**MANIFEST, **changes}
    (tmp_path / "manifest.json").write_text(json.dumps(with_checksum(whole) if sealed else whole))
    with suppress(CheckpointError):
        Checkpoint(tmp_path)


@BOUNDED
@given(
    st.sampled_from([20240520, 20240801, 0, -1]) | st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([1]) | st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1) | st.integers(0, 40),
    st.binary(max_size=80),
    st.sampled_from(["auto", "llmc", "nanogpt"]),
)
def test_token_shards(tmp_path, magic, version, count, tokens, format):
    path = tmp_path / "x.bin"
    path.write_bytes(struct.pack("<iii", magic, version, count) + 1012 * b"\0" + tokens)
    try:
        file = read_header(path, format)
    except DataError:
        return
    assert 0 < len(file.array) == file.count


@BOUNDED
@given(st.lists(st.binary(max_size=40) | JSON.map(lambda value: json.dumps({"text": value}).encode()), max_size=8))
def test_json_lines(tmp_path, lines):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        rows = Rows([path], tmp_path / "cache")
        texts = rows.read(np.arange(len(rows)), RowTokens(GPT2Vocabulary(), ["text"]))
    except DataError:
        return
    assert all(isinstance(text, str) for (text,) in texts)
