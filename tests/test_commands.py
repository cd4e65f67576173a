"""Every command of README and docs/, run as written but for the size of what it trains.

A page's commands run one after the other in one folder, so that a later one finds what an earlier one left there. A
block of commands that needs more than one machine says so on the page: ``<!-- not run: why -->`` stands before it.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import ROOT, free_port, train
from file_formats import idx, shard

from benchmarks import readme
from common.packages import load_transformers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # mode=verify takes minutes on slow cores

# What makes a command small.
EVERY = ["train.eval_batches=1", "data.cache_dir=cache", "device=cpu"]
SMALL = {
    "gpt2": ["model.size=tiny", "data.seq_len=32"],
    "transformer": ["model.d_model=32", "model.d_hid=64", "model.n_head=2", "data.seq_len=16"],
    "llama": ["model.n_layer=2", "train.global_batch_size=4"],
    "resnet50": ["data.image_size=32", "data.samples=100", "train.global_batch_size=12"],
}
# docs/own_model.md and docs/extending.md add files, and docs/finetuning.md begins with a model of Hugging Face's:
# test_extending.py and test_finetuning.py, under tests/training, run these pages.
OTHERS = ("own_model.md", "extending.md", "finetuning.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in readme.PAGES if path.name not in OTHERS}


@dataclass(frozen=True)
class Command:
    """A line of a page: what comes before train.py's own words (torchrun's options), and these."""

    prefix: tuple[str, ...]
    words: tuple[str, ...]
    why_not: str | None = None


def commands(page: str) -> list[Command]:
    """The lines of a page that call train.py, with the reason of those that are not run."""
    found, why_not = [], None
    for line in PAGES[page].splitlines():
        if reason := re.fullmatch(r"<!-- not run: (.*) -->", line):
            why_not = reason[1]
        elif re.match(r" {4}(python|torchrun|pip) .*train\.py", line):
            words = shlex.split(line.strip().split("&& ")[-1], comments=True)
            at = words.index("train.py")
            found.append(Command(tuple(words[1:at]), tuple(words[at + 1 :]), why_not))
        elif line and not line.startswith(" "):
            why_not = None
    return found


def smaller(words: tuple[str, ...], number: int, folder: Path) -> list[str]:
    """The command's words, and those that make it small; of a sweep, two values of each key.

    Args:
        words: The command's.
        number: Its place on the page, from 0 on: a run that resumes another one has to go further.
        folder: What is to be written to /tmp is written there.
    """
    said = dict(word.partition("=")[::2] for word in words if "=" in word)
    if "--help" in words or said.get("mode") == "plan" and "parallel.balance" in said:
        return list(words)
    words = tuple(word.replace("=/tmp/", f"={folder}/") for word in words)
    if "-m" in words:
        words = tuple(re.sub(r"^([^,\[]+,[^,]+),.*", r"\1", word) for word in words)
    steps = 2 + 2 * number if "train.resume" in said else 2
    few = {None: [f"train.steps={steps}", "train.epochs=null"]}.get(said.get("mode"), [])
    small = [] if {"checkpoint", "train.resume"} & set(said) else SMALL.get(said.get("model", ""), [])
    return [*words, *EVERY, *few, *small]


# Pages share nothing: workers take them one by one.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.xdist_group(page)) for page in PAGES if commands(page)]
)
def test_every_command_of_a_page_runs(page, tmp_path):
    if page == "docs/serving.md":
        pytest.importorskip("onnxruntime", reason="needs pip install -r requirements-serving.txt")
    prepare(tmp_path)
    for number, command in enumerate(dict.fromkeys(commands(page))):
        if command.why_not is not None:
            continue
        torchrun = ["-m", "torch.distributed.run", "--master-port", str(free_port()), *command.prefix]
        # wandb takes seconds: only the README's commands log as they would.
        run = train(
            [*smaller(command.words, number, tmp_path), *(["logger=none"] if page != "README.md" else [])],
            tmp_path / f"command-{number}",
            prefix=torchrun if command.prefix else [],
            cwd=tmp_path,
            own_folder=False,
            timeout_s=1200,
        )
        assert run.code == 0, f"{' '.join(command.words)}\n{run.console}"


def prepare(folder: Path) -> None:
    """The user's own data that the pages name, small files in each format; FOLDER and MIXTURE, models
    of Hugging Face's; ROWS."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    from PIL import Image
    from tokenizer_folders import tokenizer_folder

    transformers = load_transformers()

    mine = folder / "my"
    for name in ("wikitext2", "shards", "mnist", "rows", "arrays"):
        (mine / name).mkdir(parents=True)
    text = (ROOT / "train.py").read_text() * 20
    for split in ("train", "valid", "test"):
        (mine / "wikitext2" / f"{split}.txt").write_text(text)
    (mine / "notes.txt").write_text(text)
    row = json.dumps({"question": "How far is the moon?", "answer": "About 384,400 km, or thirty Earths in a row."})
    (mine / "rows.jsonl").write_text(f"{row}\n" * 300)
    (folder / "ROWS").mkdir()
    for split, n in (("train", 300), ("test", 60)):
        (folder / "ROWS" / f"{split}.jsonl").write_text(f"{row}\n" * n)
    said = [{"role": "user", "content": "How far is the moon?"}, {"role": "assistant", "content": "About 384,400 km."}]
    (mine / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 300)
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**llama, vocab_size=1000)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "FOLDER")
    tokenizer_folder(folder / "FOLDER")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    mixture = transformers.Qwen3MoeConfig(**llama, **experts, head_dim=16, vocab_size=1000)
    transformers.Qwen3MoeForCausalLM(mixture).save_pretrained(folder / "MIXTURE")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(row)] * 300), mine / "rows" / "some.parquet")
    for name, width in (("x", 10), ("y", 5)):
        np.save(mine / "arrays" / f"{name}.npy", np.ones((200, width), dtype=np.float32))
    for animal in ("bird", "cat", "dog"):
        (mine / "photos" / animal).mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (40, 32), (number, 0, 0)).save(mine / "photos" / animal / f"{number}.jpg")
    for split in ("train", "val"):
        (mine / "shards" / f"my_{split}_000000.bin").write_bytes(shard([*range(2500), 50256, *range(2499)]))
    for split, n in (("train", 400), ("t10k", 100)):
        for kind, shape in (("images-idx3", (n, 28, 28)), ("labels-idx1", (n,))):
            (mine / "mnist" / f"{split}-{kind}-ubyte").write_bytes(idx(np.zeros(shape, dtype=np.uint8)))
