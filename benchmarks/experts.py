"""Two processes that share experts against one process, one thread each; and grouped products against a loop.

    python -m benchmarks experts [shared] [loop] [--rounds 5] [--quick]

shared: a mixture of 8 experts, of which each token takes 2, in fp32 with AdamW. The layouts take turns in the same two
processes, with the same global batch. *State* is weights and the optimizer's state of the rank with the most, and *a
layer sends* is what a rank sends for each layer in a step. The formula is that of tokens that are spread evenly.

loop: a step of model=moe against one of transformers' Mixtral of the same sizes, whose products are in a loop over
experts, in one process of one thread.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from benchmarks import ranks
from benchmarks.context import ONE, sent_columns, side_by_side
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, paired, tabulate, take_turns
from benchmarks.trainer import PlainLoop, Trainer, adamw, configured
from common.packages import load_transformers

PARTS = ("shared", "loop")
SHARED = "ep=2"
OURS, LOOP = "model=moe", "transformers, a loop"
COMMON = [
    "model=moe", "model.n_layer=4", "model.n_embd=256", "model.n_head=8", "model.kv_heads=4", "model.experts=8",
    "model.top_k=2", "model.expert_width=512", "model.vocab_size=2048", "data=stdlib", "data.max_vocabulary=2048",
    "data.seq_len=512", "train.global_batch_size=8", "train.precision=fp32", "logger=none", "device=cpu",
]  # fmt: skip
TOY = [
    *COMMON, "model.n_layer=2", "model.n_embd=32", "model.head_dim=8", "model.expert_width=64", "model.vocab_size=256",
    "data.max_vocabulary=256", "data.seq_len=32",
]  # fmt: skip
# What each of them has that COMMON has not.
SIZES = {
    "8, 2 for each token": [],
    "64, 8 for each token": ["model.experts=64", "model.top_k=8", "model.expert_width=64"],
    "128, 8 for each token": [
        "model.experts=128", "model.top_k=8", "model.expert_width=64", "train.global_batch_size=2",
    ],
}  # fmt: skip


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of the parts."""
    common, parts = TOY if chosen.quick else COMMON, chosen.parts or PARTS
    setup = configured(common)  # prepares the words once
    about = {"words": common, "rounds": chosen.rounds, "parameters": setup.plan.parameters}
    if "shared" in parts:
        yield Table("experts", shared(common, chosen.rounds), about)
    if "loop" in parts:
        yield Table("experts_loop", loops(common, chosen.rounds), about)


def shared(common: Sequence[str], rounds: int) -> list[dict]:
    """Return the rows of one process, and of two that share experts."""
    runs = {ONE: [*common, "parallel=single"], SHARED: [*common, "parallel=expert", "parallel.ep=2"]}
    seconds, found = ranks.run(side_by_side, runs, rounds)

    def columns(name: str, spread: Spread) -> dict[str, str]:
        one, mine = (found[run].held["weights"] + found[run].held["optimizer"] for run in (ONE, name))
        return {
            "times one process": f"{paired(seconds, ONE, name):.2f}",
            "MiB of state": f"{mine / 2**20:,.1f}",
            "times that of one process": f"{mine / one:.2f}",
            **sent_columns(configured(runs[name]), found[name]),
        }

    return tabulate(seconds, columns)


def loops(common: Sequence[str], rounds: int) -> Iterator[dict]:
    """Yield a row for each size of model."""
    for name, more in SIZES.items():
        words = [*common, *more, "parallel=single"]
        setup = configured(words)
        assert setup.data.seq_len is not None  # the data are tokens
        tokens = setup.plan.global_batch_size * setup.data.seq_len
        seconds = ranks.run(in_turns, words, rounds)
        speeds = {run: f"{tokens / Spread.of(times).median:,.0f}" for run, times in seconds.items()}
        yield {"experts": name, "tokens": tokens, **{f"tokens/s, {run}": speed for run, speed in speeds.items()},
               "times as fast": f"{paired(seconds, OURS, LOOP):.2f}"}  # fmt: skip


def in_turns(rank: int, words: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps of this project's mixture and of transformers', on the first rank."""
    if rank:
        return {}
    trainer = Trainer(configured(words))
    model = mixtral(trainer)
    plain = PlainLoop(trainer, lambda x, y: model(input_ids=x, labels=y, shift_labels=y).loss, adamw(model))
    return take_turns({OURS: trainer.step, LOOP: plain.step}, rounds)


def mixtral(trainer: Trainer):
    """Return transformers' Mixtral of the sizes of a trainer's model."""
    transformers, cfg = load_transformers(), trainer.setup.cfg.model
    config = transformers.MixtralConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.expert_width,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim, num_local_experts=cfg.experts, num_experts_per_tok=cfg.top_k, use_cache=False,
        tie_word_embeddings=cfg.tied, max_position_embeddings=cfg.block_size, router_aux_loss_coef=cfg.balance,
        output_router_logits=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()


BENCHMARK = Benchmark(measure, rounds=5, parts=PARTS)
