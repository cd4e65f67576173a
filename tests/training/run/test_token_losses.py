"""Label smoothing and the z-loss of language models, in every layout, beside a loop in plain torch."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from composed import LAYOUTS, config, losses, records, run_layout, saved
from tokenizer_folders import tokenizer_folder

from common.errors import TrainingError
from data.loader import EvalBatches
from models.losses import IGNORED
from training.run.prepare import model_and_data, prepare

CONTEXT = (2, ["parallel=context", "parallel.cp=2", "parallel.context=ring", "parallel.chunks=2"])
SMOOTHING, Z = 0.1, 0.02
WORDS = ["train.epochs=null", "train.global_batch_size=8", "train.precision=fp64", "train.grad_clip=null"]
WORDS += ["scheduler=constant", "optim=sgd", "optim.lr=0.3", "optim.momentum=0.9", "data.seq_len=32"]
WORDS += [f"train.label_smoothing={SMOOTHING}", f"train.z_loss={Z}"]
WORDS += ["model.vocab_size=385", "train.checkpoint_every=1", "train.keep_checkpoints=99", "train.eval_batches=null"]
SIZES = {
    "gpt2": [
        "model=gpt2",
        "model.size=tiny",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=32",
        "model.vocab_size=385",
    ],
    "llama": ["model=llama", "model.size=tiny", "model.n_layer=2"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of different lengths: their padding does not count."""
    folder = tmp_path_factory.mktemp("rows")
    lines = (json.dumps({"text": "She sold " + "clips " * (i * 7 % 30 + 1)}) + "\n" for i in range(200))
    (folder / "x.jsonl").write_text("".join(lines))
    tokenizer = f"data.tokenizer={tokenizer_folder(folder / 'tokenizer')}"
    return ["data=jsonl", f"data.root={folder}/x.jsonl", f"data.cache_dir={folder}/cache", tokenizer]


def plain(words, steps):
    """Losses, cross entropies, final weights and validation perplexity of a loop that knows no fused head."""
    setup = prepare(config(*words, f"train.steps={steps}"))
    layers = setup.chain.build(setup.chain.names, setup.cfg.seed, torch.device("cpu"), torch.float64)
    optimizer, batches, found = torch.optim.SGD(layers.parameters(), lr=0.3, momentum=0.9), setup.batches(), []

    def computed(batch):
        logits, targets = layers(batch.inputs).flatten(0, 1), batch.targets.flatten()
        return logits, targets, F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED).item()

    for step in range(1, steps + 1):
        logits, targets, of_tokens = computed(batches[step])
        counted = targets != IGNORED
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=SMOOTHING)
        loss = loss + Z * logits.logsumexp(1)[counted].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), of_tokens / counted.sum().item()))
    total = count = 0.0
    assert setup.data.valid is not None
    with torch.no_grad():
        for batch in EvalBatches(setup.data.valid, 1):
            total += computed(batch)[2]
            count += (batch.targets != IGNORED).sum().item()
    return found, dict(layers.state_dict()), math.exp(total / count)


@pytest.mark.parametrize(
    "model, layouts",
    [
        ("gpt2", ["pipelined tp"]),
        pytest.param("gpt2", ["single", "ddp", "pipelined", "pipe_fsdp", "tensor", "context"], marks=pytest.mark.slow),
        pytest.param("llama", ["tensor sequence", "single", "fsdp tp", "context", "hsdp"], marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_those_of_a_plain_loop_and_go_on_in_any_layout(ranks, rows, tmp_path, model, layouts):
    """Each layout does one step, from the checkpoint of the one before."""
    words, path, found = [*SIZES[model], *rows, *WORDS], None, []
    wanted, weights, perplexity = plain(words, len(layouts))
    for step, name in enumerate(layouts, 1):
        resumed = [f"train.resume='{path}'"] if path else []
        layout = CONTEXT if name == "context" else LAYOUTS[name]
        run = run_layout(ranks, layout, tmp_path / str(step), *words, *resumed, f"train.steps={step}")
        path = run / "checkpoints" / f"step-{step:08d}"
        found += [(line["loss"], line["token_loss"]) for line in records(run) if "loss" in line]
    assert found == [pytest.approx(pair, rel=1e-12) for pair in wanted]
    for name, tensor in saved(run, len(layouts)).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12, msg=name)
    last = records(run)[-1]
    assert last["val_perplexity"] == pytest.approx(perplexity, rel=1e-12)
    assert (
        last["val_perplexity"]
        == pytest.approx(math.exp(last["val_token_loss"]), rel=1e-12)
        != math.exp(last["val_loss"])
    )


def test_a_loss_in_the_configuration_has_the_same_terms(rows, tmp_path):
    from composed import run

    words = [*SIZES["gpt2"], *rows, *[word for word in WORDS if "smoothing" not in word and "z_loss" not in word]]
    loss = f"model.loss={{_target_: models.losses.TokenCrossEntropy, label_smoothing: {SMOOTHING}, z_loss: {Z}}}"
    run(tmp_path / "by loss", *words, "train.steps=2", loss)
    run(tmp_path / "by keys", *SIZES["gpt2"], *rows, *WORDS, "train.steps=2")
    assert losses(tmp_path / "by loss") == losses(tmp_path / "by keys")


@pytest.mark.parametrize(
    "words, message",
    [
        (["model=gpt2", "train.label_smoothing=1"], r"train.label_smoothing=1.0 must be at least 0, and below 1"),
        (["model=gpt2", "train.z_loss=-1"], r"train.z_loss=-1.0 must be at least 0, and below inf"),
        (["model=convnet", "train.label_smoothing=0.1"], r"label_smoothing needs the cross entropy of tokens"),
    ],
)
def test_wrong_terms_are_errors_before_the_run(words, message):
    from training.run.checks.configuration import check_train

    with pytest.raises(TrainingError, match=message):
        check_train(cfg := config(*words))
        model_and_data(cfg)
