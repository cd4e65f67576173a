"""Packed rows against padded rows, rows of similar length and trl's packing: counted tokens per second, side by side.

    GSM8K=FOLDER python -m benchmarks packing [--rounds 5] [--quick]

FOLDER has GSM8K's train.jsonl. The tiny Llama trains in fp32 on questions and answers, in rows of 1,024 tokens, on two
threads. The contenders take turns. A step has about as many documents for each of them, and a micro-batch about as many
positions: one row, or 8 of similar length.

counted tokens/s    targets that count in the loss, by the seconds of forward, backward, clipping and update
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Benchmark, Table
from benchmarks.timing import take_turns
from benchmarks.trainer import Trainer, configured
from common.packages import load_transformers
from data.dataset import PADDING_TARGET, Batch
from data.loader import TrainBatches

SIMILAR_LENGTH, PACKED, TRL = "data.bucket_by_length=true", "data.packing=true", "trl, packing=True"
ROWS, DOCUMENTS, SIMILAR, THREADS = 8, 40, 8, 2
COMMON = [
    "model=llama", "model.size=tiny", "data=jsonl", "data.field=[question,answer]", "train.precision=fp32",
    "parallel=single", "logger=none", "device=cpu", "data.seq_len=1024",
]  # fmt: skip
TINY = [
    "data.seq_len=256",
    "model.n_layer=1",
    "model.n_embd=32",
    "model.n_head=2",
    "model.kv_heads=1",
    "model.mlp_width=32",
]
SIZE, CHUNKS = "train.global_batch_size={}", "parallel.chunks={}"
RUNS = {
    "padded": [SIZE.format(DOCUMENTS), CHUNKS.format(DOCUMENTS)],
    SIMILAR_LENGTH: [SIZE.format(DOCUMENTS), CHUNKS.format(DOCUMENTS // SIMILAR), SIMILAR_LENGTH],
    PACKED: [SIZE.format(ROWS), CHUNKS.format(ROWS), PACKED],
}


class Ours(Trainer):
    """A trainer that reads a new batch in each step, and counts its targets."""

    def __init__(self, words: list[str], rounds: int) -> None:
        super().__init__(configured(words))
        plan, cfg = self.setup.plan, self.setup.cfg
        batches = TrainBatches(self.setup.data.train, plan.global_batch_size, cfg.seed)
        self._read = [batches[number] for number in range(1, rounds + 2)]
        self.counted = [int((batch.targets != PADDING_TARGET).sum()) for batch in self._read]

    def batch(self, number: int) -> Batch:
        """Return the batch of step ``number``."""
        return self._read[number - 1]


class Theirs:
    """trl's SFTTrainer on the same model and the same tokens, with the same optimizer."""

    def __init__(self, ours: Ours, rounds: int, folder: str) -> None:
        transformers = load_transformers()
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from trl import SFTConfig, SFTTrainer

        data, cfg, form = ours.setup.data, ours.setup.cfg, ours.setup.chain.hugging_face
        rows = data.train.documents.tokens(torch.arange(len(data.train.documents)).numpy(), data.seq_len)
        words = {"<|endoftext|>": data.vocabulary.end}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, "<|endoftext|>")),
            eos_token="<|endoftext|>",
            pad_token="<|endoftext|>",
        )
        how = {"packing": True, "max_length": data.seq_len, "use_cpu": True, "bf16": False, "report_to": []}
        how |= {"per_device_train_batch_size": 1, "gradient_checkpointing": False, "dataloader_pin_memory": False}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**form.config))
        layers = ours.setup.chain.build(ours.setup.chain.names, cfg.seed, torch.device("cpu"))
        model.load_state_dict({form.their_name(name): x for name, x in layers.state_dict().items()}, strict=False)
        self.trainer: Any = SFTTrainer(
            model,
            SFTConfig(folder, learning_rate=ours.optimizer.base_lr, disable_tqdm=True, **how),
            train_dataset=Dataset.from_dict({"input_ids": [tokens for tokens, _ in rows]}),
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = ROWS
        loader, self.limit = iter(self.trainer.get_train_dataloader()), cfg.train.grad_clip
        self._read = [[next(loader) for _ in range(ROWS)] for _ in range(rounds + 1)]
        counted = [sum(int((one["labels"][:, 1:] != PADDING_TARGET).sum()) for one in step) for step in self._read]
        self.counted, self.parameters = counted, list(model.parameters())

    def step(self, number: int) -> None:
        """Run a step to its end."""
        for one in self._read[number - 1]:
            self.trainer.training_step(self.trainer.model, dict(one))
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.limit)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all contenders."""
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        root = os.environ.get("GSM8K") or _like_it(Path(folder))
        common = [*COMMON, *TINY * chosen.quick, f"data.root={root}", f"data.cache_dir={folder}/cache"]
        contenders: dict[str, Any] = {name: Ours([*common, *words], chosen.rounds) for name, words in RUNS.items()}
        contenders[TRL] = Theirs(contenders[PACKED], chosen.rounds, folder)
        steps: dict[str, Callable[[int], object]] = {name: one.step for name, one in contenders.items()}
        seconds = take_turns(steps, chosen.rounds)
    rates = {
        name: [count / s for count, s in zip(contenders[name].counted[1:], of, strict=True)]
        for name, of in seconds.items()
    }
    rows = [
        {
            "run": name,
            "counted tokens a step": f"{statistics.mean(contenders[name].counted):,.0f}",
            "counted tokens/s": f"{statistics.median(rate):,.0f}",
            "packed is times as fast": f"{_ratio(rates[PACKED], rate):.2f}",
        }
        for name, rate in rates.items()
    ]
    yield Table("packing", rows, {"threads": THREADS, "rounds": chosen.rounds, "words": common[: len(COMMON)]})


def _ratio(one: list[float], other: list[float]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _like_it(folder: Path) -> Path:
    """Write rows about as long as those of GSM8K."""
    drawn = random.Random(0)
    texts = [" ".join(["word"] * int(drawn.lognormvariate(4.9, 0.4))) for _ in range(2000)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"question": "why", "answer": one}) + "\n" for one in texts))
    return folder


BENCHMARK = Benchmark(measure, rounds=5)
