"""A run on a mixture: beside a loop in plain torch, in every layout, resumed, and each part evaluated apart."""

import json
from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
import torch
from commandline import records
from composed import LAYOUTS, losses, run_layout, steps
from tokenizer_folders import tokenizer_folder
from torch import nn

from conf.composition import compose
from conf.instantiate import to_dict
from data.loader import permute
from data.mixture import Mixture
from data.tensors import TensorData
from train import main
from training import train

STEPS, BATCH, SEED = 8, 6, 5
WEIGHTS = {"large": 3, "small": 1}
QUIET = ["logger=none", "device=cpu", "parallel.threads=1"]


def numbers(count, offset):
    drawn = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, generator=drawn, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) * offset + 1


def test_it_is_a_plain_loop_over_the_part_that_lags_most_behind_its_share_also_if_resumed(tmp_path):
    rows = {"large": numbers(40, 1.0), "small": numbers(5, -2.0)}
    held = {"large": numbers(7, 1.0), "small": numbers(3, -2.0)}
    given = {name: (TensorData(*rows[name], valid=held[name], test=0), weight) for name, weight in WEIGHTS.items()}
    net = nn.Linear(4, 1, dtype=torch.float64)
    words = ["train.epochs=null", f"train.global_batch_size={BATCH}", "train.precision=fp64", "optim.lr=0.05", *QUIET]

    def run(folder, last, *more):
        mixture = Mixture({name: (deepcopy(part), weight) for name, (part, weight) in given.items()}, SEED)
        folder = f"hydra.run.dir={tmp_path}/{folder}"
        return train(*words, f"train.steps={last}", folder, *more, model=net, loss=nn.MSELoss(), data=mixture)

    whole = run("whole", STEPS)
    run("half", 3, "train.checkpoint_every=3")
    run("half", STEPS, "train.resume=auto")

    plain, taken, expected = deepcopy(net), Counter(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for first in range(0, STEPS * BATCH, BATCH):
        batch = []
        for place in range(first + 1, first + BATCH + 1):
            lags = [weight / 4 * place - taken[name] for name, weight in WEIGHTS.items()]
            part = lags.index(max(lags))
            name = [*WEIGHTS][part]
            inputs, targets = given[name][0].train.inputs, given[name][0].train.targets
            epoch, row = divmod(taken[name], len(targets))
            row = int(permute(np.array([row]), len(targets), (SEED, part, epoch))[0])
            taken[name] += 1
            batch.append((inputs[row], targets[row]))
        inputs, targets = map(torch.stack, zip(*batch, strict=True))
        loss = nn.functional.mse_loss(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses(tmp_path / "whole") == pytest.approx(expected, rel=1e-12)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(whole.state_dict()[name], tensor, rtol=1e-12)
    last = records(tmp_path / "whole")[-1]
    apart = {name: nn.functional.mse_loss(plain(x), y).item() for name, (x, y) in held.items()}
    assert {name: last[f"val_loss_{name}"] for name in apart} == pytest.approx(apart, rel=1e-12)
    assert last["val_loss"] == pytest.approx((7 * apart["large"] + 3 * apart["small"]) / 10, rel=1e-12)


# -- language, in every layout ---------------------------------------------------------------------------------------

CHATS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def mixed(text, tmp_path_factory):
    """Words of a mixture of a text and of chats, which are fewer than a batch and have no test split."""
    folder = tmp_path_factory.mktemp("mixed")
    asked = ({"role": "user", "content": f"{i}?"} for i in range(11))
    chats = ([question, {"role": "assistant", "content": "yes " * (i + 1)}] for i, question in enumerate(asked))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    (folder / "chat.jinja").write_text(CHATS)
    root = text[1].removeprefix("data.root=")
    parts = f"book: {{name: text, root: {root}, weight: 3}}, talk: {{name: jsonl, messages: chat, weight: 0.5"
    parts += f", root: {folder}/chats.jsonl, template: {folder}/chat.jinja}}"
    tokenizer = tokenizer_folder(folder / "tokenizer")
    words = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.n_head=2"]
    words += ["model.dropout=0.1", "model.vocab_size=384", "train.epochs=null"]
    words += ["train.global_batch_size=8", "train.precision=fp64", "scheduler=constant", "optim=adamw"]
    data = ["data=mixture", "data.seq_len=16", f"data.tokenizer={tokenizer}", f"data.cache_dir={folder}/cache"]
    return [*words, "optim.lr=1e-3"], [*data, f"data.parts={{{parts}}}"]


def section(mixed, *more):
    words, data = mixed
    return to_dict(compose([*words, *data, *more]).data)


LAYOUTS_OF_IT = [(name, []) for name in ("ddp", "pipelined", "pipe_fsdp", "tensor", "pipe_ddp")]
LAYOUTS_OF_IT += [("pipelined", ["data.packing=true"])]


@pytest.mark.slow
@pytest.mark.parametrize("layout, more", LAYOUTS_OF_IT, ids=str)
def test_every_layout_trains_and_evaluates_alike_and_continues_another(mixed, ranks, tmp_path_factory, layout, more):
    words, data = mixed[0], section(mixed, *more)

    def run(name, where, *more):
        return run_layout(ranks, where, tmp_path_factory.mktemp(name.replace(" ", "-")), *words, *more, data=data)

    rhythm = ["train.checkpoint_every=3", "train.eval_every=3", "train.eval_batches=2"]
    single = run("single", "single", *rhythm, "train.steps=6")
    other = run("other", layout, *rhythm, "train.steps=6")
    checkpoint = f"train.resume='{single}/checkpoints/step-00000003'"
    resumed = run("resumed", layout, *rhythm, "train.steps=6", checkpoint)
    assert losses(other) == pytest.approx(losses(single), rel=1e-9)
    assert losses(resumed) == pytest.approx(losses(single)[3:], rel=1e-9)
    evaluations = [[line for line in records(run) if "val_loss" in line] for run in (single, other, resumed)]
    assert {"val_loss_book", "val_loss_talk"} < evaluations[0][-1].keys()
    for found in evaluations[1:]:
        assert found[-1] == pytest.approx(evaluations[0][-1], rel=1e-9)


@pytest.mark.slow
def test_the_losses_of_parts_are_those_of_evaluations_of_each_part(mixed, tmp_path):
    words, data = mixed
    run = [*words, *data, *QUIET, "train.steps=4", "train.eval_batches=null", f"hydra.run.dir={tmp_path}/run"]
    assert main([*run, "train.monitor=val_loss_talk", "sample.at_end=0"]) == 0
    found = next(line for line in records(tmp_path / "run") if "val_loss" in line)
    parts = section(mixed)["parts"]
    for name, option in (("book", "text"), ("talk", "jsonl")):
        own = {key: value for key, value in parts[name].items() if key in ("root", "messages", "template", "tokenizer")}
        alone = [f"data={option}", "data.seq_len=16", *(f"data.{key}={value}" for key, value in own.items())]
        command = ["mode=eval", f"checkpoint='{tmp_path}/run'", *alone, f"hydra.run.dir={tmp_path}/{name}", *QUIET]
        assert main(command) == 0
        assert records(tmp_path / name)[0]["val_loss"] == pytest.approx(found[f"val_loss_{name}"], rel=1e-12)
    again = ["mode=eval", f"checkpoint='{tmp_path}/run'", f"hydra.run.dir={tmp_path}/again", *QUIET]
    assert main(again) == 0
    assert records(tmp_path / "again")[0] == pytest.approx(found, rel=1e-12)
    sampled = ["mode=sample", f"checkpoint='{tmp_path}/run'", "sample.prompt=def", "sample.tokens=3", *QUIET]
    assert main(sampled) == 0


@pytest.mark.slow
def test_images_of_several_sizes_of_parts_resumed_with_another_global_batch(tmp_path, ranks):
    words = ["model=convnet", "train.epochs=null", "train.precision=fp64", "train.eval_every=null", "optim.lr=1e-3"]
    parts = "{digits: {weight: 0.1}, noise: {name: random_images, samples: 5, weight: 3}}"
    data = to_dict(compose(["model=convnet", "data=mixture", f"data.parts={parts}"]).data)
    sizes = ["train.global_batch_size=12", "train.global_batch_size=24"]

    def run(layout, name, *more):
        return run_layout(ranks, layout, tmp_path / name, *words, *more, data=data)

    run("single", "whole", sizes[0], "train.steps=8", "train.checkpoint_every=4")
    continues = f"train.resume='{tmp_path}/whole/checkpoints/step-00000004'"
    alike = {name: run(name, name, sizes[1], "train.steps=6", continues) for name in ("single", "pipelined")}
    assert losses(alike["pipelined"]) == pytest.approx(losses(alike["single"]), rel=1e-9)
    assert [line["step"] for line in steps(alike["single"])] == [5, 6] and LAYOUTS
