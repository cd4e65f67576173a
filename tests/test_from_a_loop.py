"""docs/from_a_loop.md: its programs as written, and what it says of plain loops and of this project."""

import inspect
import re

import numpy as np
import pytest
import torch
from composed import compose, config
from interpreters import ROOT, python
from torch import nn

from conf import keys_of
from conf.schema import Train
from conf.words import quote_value
from data.dataset import InMemory
from data.loader import EvalBatches, TrainBatches
from training.optimizer import CosineWarmup, Step

PAGE = (ROOT / "docs" / "from_a_loop.md").read_text()


@pytest.mark.slow
def test_the_losses_of_both_programs_are_equal(tmp_path):
    (tmp_path / "page.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)))
    done = python("page.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^(single|pipelined) (\S+)$", done.stdout, flags=re.M))
    assert found.keys() == {"single", "pipelined"} and all(0 <= float(number) < 2e-6 for number in found.values())


def test_the_words_of_this_project_compose():
    cells = re.findall(r"\| ([^|]*) \|$", PAGE[: PAGE.index("## Both programs")], flags=re.M)
    found = [re.findall(r"([a-z_.]+=(?:\{.*?\}|\[.*?\]|\w[\w.]*))", cell) for cell in cells]
    rows = [words for words in found if words and not words[0].startswith(("loss=", "data="))]  # of Python
    assert len(rows) > 15
    for words in rows:
        compose("model=convnet", *map(quote_value, words))


def test_the_warm_up_is_one_step_ahead_of_hugging_face_s_and_the_cosine_is_equal():
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    theirs, rates = transformers.get_cosine_schedule_with_warmup(optimizer, 5, 20), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = [CosineWarmup(warmup_steps=5, min_ratio=0).factor(step, 20, 1) for step in range(1, 21)]
    assert rates[0] == 0 and ours[:5] == pytest.approx(rates[1:6]) and ours[5:] == pytest.approx(rates[5:])
    assert keys_of("scheduler", "cosine_warmup")["min_ratio"] == 0.1


def test_a_step_schedule_is_torch_s_with_a_step_after_each_epoch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    theirs, rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), []
    for _ in range(5):
        rates += [optimizer.param_groups[0]["lr"]] * 3
        optimizer.step()
        theirs.step()
    assert [Step(2, "epoch", 0.5).factor(step, 15, 3) for step in range(1, 16)] == rates


def test_a_rest_of_an_epoch_is_left_out_and_an_evaluation_counts_every_sample_once():
    samples = InMemory(torch.arange(10.0), torch.arange(10))
    batches = TrainBatches(samples, 4, seed=1)
    assert batches.steps_per_epoch == 2 == len(torch.utils.data.DataLoader(range(10), 4, drop_last=True))
    assert not np.array_equal(batches[1].targets, batches[3].targets), "another order in the next epoch"
    weights = torch.cat([batch.weights for batch in EvalBatches(samples, 4)])
    assert weights.tolist() == [1.0] * 10 + [0.0] * 2


def test_the_defaults_that_differ_from_torch_s_are_those_of_the_page():
    own, torchs = keys_of("optim", "adamw"), inspect.signature(torch.optim.AdamW).parameters
    row = re.search(r"\| AdamW \| betas \((.*?)\), weight decay (\S+) \| torch: \((.*?)\), (\S+) \|", PAGE)
    betas, decay, their_betas, their_decay = (eval(text) for text in row.groups())
    assert (list(betas), decay) == (own["betas"], own["weight_decay"])
    assert (their_betas, their_decay) == (torchs["betas"].default, torchs["weight_decay"].default)
    here = Train()
    assert (here.max_skipped, here.precision, here.test, here.grad_clip) == (10, "auto", "last", None)
    assert not config().optim.decay_vectors and not here.tf32
