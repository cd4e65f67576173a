"""Predictions and metrics of whole splits, beside torch's own forward and torchmetrics."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from common.errors import UserError
from common.packages import load_torchmetrics
from data.tensors import TensorData
from models.losses import ClassCrossEntropy, Several, as_sums
from training import train
from training.run.split_metrics import Measured, entries

QUICK = ["train.epochs=null", "train.steps=4", "logger=none", "device=cpu", "parallel.threads=1", "optim.lr=0.1"]
TINY = [
    *QUICK,
    "model=gpt2",
    "model.size=tiny",
    "model.dropout=0",
    "data.seq_len=16",
    "train.global_batch_size=6",
    "train.eval_batches=null",
]
LAYOUTS = {
    "single": ["parallel.chunks=3"],
    "ddp": ["parallel=ddp", "parallel.dp=3"],
    "pipelined": ["parallel=pipelined", "parallel.chunks=3", "parallel.schedule=1f1b"],
    "pipe_fsdp": ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.chunks=3"],
}
OF_TEXTS = {
    **LAYOUTS,
    "tensor": ["parallel=tensor", "parallel.tp=2", "parallel.sequence=true"],
    "context": ["parallel=context", "parallel.cp=2", "parallel.chunks=2"],
}


def spread(outputs, targets):
    """A metric that needs all samples at once."""
    return {"range": float(outputs.max() - outputs.min()), "rows": len(targets)}


def both(outputs, targets):
    """A metric of a model that returns two tensors."""
    logits, features = outputs
    return (logits[:, 0] * features.sum(1)).mean() + targets.float().mean()


def right(outputs, targets):
    """The share of the tokens that are predicted right."""
    return (outputs.argmax(-1) == targets).float().mean()


def result_of(outputs, targets, found):
    """A metric with a result that is given."""
    return found


class Curve(load_torchmetrics().Metric):
    """A metric with a result that is no number, which it cannot draw."""

    def update(self, outputs, targets):
        """Keep nothing."""

    def compute(self):
        return torch.ones(3), torch.ones(3)


class TwoOutputs(nn.Module):
    """Logits and features."""

    def __init__(self):
        super().__init__()
        self.features, self.logits = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        features = self.features(x).tanh()
        return self.logits(features), features


class OfFirst(ClassCrossEntropy):
    """The loss of the first of several outputs."""

    def __call__(self, output, targets, weights):
        return super().__call__(output[0], targets, weights)


@pytest.fixture
def samples():
    """Numbers that are no multiples of a batch: 20 samples to validate on and 20 to test."""
    torch.manual_seed(1)
    inputs = torch.randn(203, 6)
    return TensorData(inputs, (inputs @ torch.randn(6, 3) + torch.randn(203, 3)).argmax(1))


def network(module=None):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)) if module is None else module()


def run(tmp_path, samples, *words, net=None, loss=None, name="run"):
    given = {"model": net or network(), "loss": loss or nn.CrossEntropyLoss(), "data": samples}
    return train(*QUICK, "train.global_batch_size=18", *words, f"hydra.run.dir={tmp_path}/{name}", **given)


def plain(result, net, inputs):
    """What the module computes itself with the trained weights."""
    net.load_state_dict(result.state_dict())
    with torch.no_grad():
        return net.eval()(inputs)


@pytest.mark.parametrize("target, name", [
    ("MulticlassAUROC", "auroc"), ("F1Score", "f1_score"), ("R2Score", "r2_score"), ("MeanSquaredError",
    "mean_squared_error"), ("torchmetrics.classification.BinaryFBetaScore", "f_beta_score"), ("mine.spread", "spread"),
])  # fmt: skip
def test_a_metric_has_the_name_of_its_class_without_the_task(target, name):
    assert [entry.name for entry in entries([{"_target_": target}])] == [name]
    assert [entry.name for entry in entries([{"_target_": target, "name": "other", "k": 1}])] == ["other"]


# The loss, targets that mean the same as classes, and the key ``output``.
TARGETS = {
    "ignored as the loss ignores": (nn.CrossEntropyLoss(ignore_index=2), lambda y: y, {}),
    "probabilities": (nn.CrossEntropyLoss(), lambda y: F.one_hot(y, 3) * 0.9 + 0.05, {}),
    "two, for one output": (Several([nn.CrossEntropyLoss()] * 2), lambda y: (y.flip(0), y), {"output": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss, given, key", TARGETS.values(), ids=TARGETS)
def test_targets_of_every_kind_are_measured_as_classes(samples, loss, given, key):
    logits, classes = network()(samples.valid.inputs).detach(), samples.valid.targets
    measured = Measured(*entries([{"_target_": "AUROC", **key}]), as_sums(loss))
    measured.update((logits,), given(classes))
    expected = load_torchmetrics().classification.MulticlassAUROC(3, ignore_index=getattr(loss, "ignore_index", None))(
        logits.softmax(1), classes
    )
    assert measured.value() == expected > 0


def test_a_function_gets_all_outputs_in_order_and_its_number_decides_which_weights_are_best(tmp_path, samples):
    words = [f"metrics=[{{_target_: {__name__}.spread}}]", "train.monitor=val_spread_range", "train.eval_every=2"]
    result = run(tmp_path, samples, *words, "train.monitor_direction=maximize")
    outputs = plain(result, network(), samples.valid.inputs)
    last = [record for record in result.metrics if "val_loss" in record][-1]
    assert last["val_spread_range"] == pytest.approx(float(outputs.max() - outputs.min()), rel=1e-6)
    assert last["val_spread_rows"] == len(samples.valid) == 20
    most = max(record["val_spread_range"] for record in result.metrics if "val_loss" in record)
    assert result.summary["best_val_spread_range"] == most
    assert result.summary["test_spread_rows"] == 20
    (evaluated,) = [
        r
        for r in train(
            f"checkpoint={tmp_path}/run",
            "mode=eval",
            f"hydra.run.dir={tmp_path}/eval",
            *words[:1],
            model=network(),
            loss=nn.CrossEntropyLoss(),
            data=samples,
        ).metrics
        if "val_loss" in r
    ]
    assert evaluated["val_spread_range"] == last["val_spread_range"]


def test_predictions_are_what_the_module_computes(tmp_path, samples):
    result, net = run(tmp_path, samples), network()
    inputs = torch.randn(7, 6)
    assert np.array_equal(result.predict(inputs.numpy()), plain(result, net, inputs).numpy())
    assert np.array_equal(result.predict("val"), plain(result, net, samples.valid.inputs).numpy())
    words = ["mode=predict", f"checkpoint={tmp_path}/run", "predict.targets=true", f"hydra.run.dir={tmp_path}/predict"]
    train(*words, model=net, loss=nn.CrossEntropyLoss(), data=samples)
    read = {path.name: np.load(path) for path in (tmp_path / "predict" / "predictions").iterdir()}
    assert read.keys() == {"test.npy", "test_targets.npy", "test_ids.npy"}
    assert np.array_equal(read["test.npy"], result.predict()) and len(read["test.npy"]) == 20
    assert np.array_equal(read["test_targets.npy"], samples.test.targets.numpy())
    assert np.array_equal(read["test_ids.npy"], samples.rows["test"].numpy()), "the rows that were drawn"


@pytest.mark.slow
def test_several_outputs_are_several_arrays_and_a_function_gets_them_all(tmp_path, samples):
    words = [f"metrics=[{{_target_: {__name__}.both}}, {{_target_: {__name__}.spread, output: 1}}]"]
    result = run(tmp_path, samples, *words, net=network(TwoOutputs), loss=OfFirst())
    outputs = plain(result, TwoOutputs(), samples.test.inputs)
    for found, wanted in zip(result.predict("test"), outputs, strict=True):
        assert np.array_equal(found, wanted.numpy())
    assert result.summary["test_both"] == pytest.approx(float(both(outputs, samples.test.targets)), rel=1e-5)
    assert result.summary["test_spread_range"] == pytest.approx(float(outputs[1].max() - outputs[1].min()), rel=1e-6)


class Sideways(nn.Module):
    """Logits, samples in the second dimension, a matrix without samples, and a number."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(6, 3)

    def forward(self, x):
        logits = self.logits(x)
        return logits, torch.stack([logits] * 36), self.logits.weight * 1, logits.sum()


def test_predictions_in_python_have_samples_first_wherever_the_model_has_them(tmp_path, samples):
    result = run(tmp_path, samples, net=network(Sideways), loss=OfFirst())
    logits, sideways, *_ = plain(result, Sideways(), samples.test.inputs)
    for inputs in ("test", samples.test.inputs):
        first, second = result.predict(inputs)
        assert np.array_equal(first, logits.numpy()) and np.array_equal(second, sideways.movedim(1, 0).numpy())


WRONG = {
    "twice": ("[{_target_: NAME.spread}, {_target_: NAME.spread}]", "spread twice"),
    "of the loss": ("[{_target_: NAME.spread, name: accuracy}]", "has a number accuracy already"),
    "missing": ("[{_target_: NAME.sprad}]", "names nothing"),
    "no name": ("[3]", "3 names nothing"),
    "gives nothing": ("[{_target_: NAME.result_of, found: null}]", "metrics: result_of is None, which is no number"),
    "gives a list": ("[{_target_: NAME.result_of, found: [1, 2]}]", r"result_of is \[1, 2\], which is no number"),
    "a text": ("[{_target_: NAME.result_of, found: {a: 1, b: good}}]", "result_of_b is 'good', which is no number"),
    "gives a curve": ("[{_target_: NAME.Curve, name: c}]", r"c is \(tensor.*which is no number"),
    "not as a target": ("[NAME.spread]", "spread names nothing"),
}


@pytest.mark.parametrize("metrics, message", WRONG.values(), ids=WRONG)
def test_a_wrong_metric_is_an_error_before_the_first_step(tmp_path, samples, metrics, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, samples, f"metrics={metrics.replace('NAME', __name__)}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_number_that_a_function_does_not_give_is_an_error_before_the_first_step(tmp_path, samples):
    with pytest.raises(UserError, match="train.monitor=val_spread_rang is not a number.*val_spread_range"):
        run(
            tmp_path,
            samples,
            f"metrics=[{{_target_: {__name__}.spread}}]",
            "train.monitor=val_spread_rang",
            "train.monitor_direction=minimize",
        )
    with pytest.raises(UserError, match="predict.split"):
        data = TensorData(samples.train.inputs, samples.train.targets, test=0)
        run(tmp_path, data, name="untested").predict("test")


CLASSES = "MulticlassAUROC, {_target_: torchmetrics.F1Score, average: macro}, ConfusionMatrix, ROC, CalibrationError"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchmetrics_gives_what_it_gives_on_one_device_also_after_a_resume(tmp_path, samples, layout):
    """Resumed in the middle, from one process; the last batch of 20 is filled up to 36."""
    metrics = [f"metrics=[{CLASSES}, {{_target_: {__name__}.spread}}]", "train.monitor=val_auroc", "train.eval_every=1"]
    run(tmp_path, samples, *metrics, "train.steps=2", name="first")
    words = ["train.steps=4", f"train.resume={tmp_path}/first"]
    single = run(tmp_path, samples, *metrics, *words, name="single")
    result = run(tmp_path, samples, *metrics, *words, *LAYOUTS[layout], name="resumed")
    from torchmetrics import classification

    net = network()
    logits, targets = plain(result, net, samples.valid.inputs), samples.valid.targets
    last = [record for record in result.metrics if "val_loss" in record][-1]
    wanted = {
        "val_auroc": classification.MulticlassAUROC(3)(logits, targets),
        "val_f1_score": classification.MulticlassF1Score(3, average="macro")(logits, targets),
        "val_calibration_error": classification.MulticlassCalibrationError(3)(logits, targets),
        "val_spread_range": logits.max() - logits.min(),
    }
    for name, value in wanted.items():
        assert last[name] == pytest.approx(float(value), rel=1e-5), name
    for name in ("best_val_auroc", "best_step", "test_auroc", "test_spread_range"):
        assert result.summary[name] == pytest.approx(single.summary[name], rel=1e-5), name
    for name in ("val_confusion_matrix", "test_roc"):
        with Image.open(result.run_dir / f"{name}.png") as image:
            assert image.width > 100
    words = [f"checkpoint={tmp_path}/resumed", *LAYOUTS[layout], "train.global_batch_size=18"]
    train(
        "mode=predict", *words, f"hydra.run.dir={tmp_path}/predict", model=net, loss=nn.CrossEntropyLoss(), data=samples
    )
    written = np.load(tmp_path / "predict" / "predictions" / "test.npy")
    np.testing.assert_allclose(written, plain(result, net, samples.test.inputs).numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text of 13 windows of 16 tokens to test on, and rows of prompts and answers with ids."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(
        "\n".join(f"the {i}th word is {'abcdefg'[i % 7] * (i % 5 + 1)}" for i in range(450))
    )
    rows = ({"id": f"row-{i}", "q": f"{i} and {i % 3}?", "a": "yes no perhaps".split()[i % 3]} for i in range(60))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / name / "predictions" / "test.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_TEXTS)
def test_of_texts_the_losses_of_all_tokens_are_predicted_and_tokens_have_metrics(tmp_path, texts, layout):
    """Beside cross entropy of the logits of one process, and the loss of the run's test."""
    words = [
        "data=text",
        f"data.root={texts}/text.txt",
        f"metrics=[{{_target_: Perplexity, name: ppl}}, {{_target_: {__name__}.right}}]",
        *OF_TEXTS[layout],
    ]
    result = train(*TINY, *words, f"hydra.run.dir={tmp_path}/run")
    train("mode=predict", f"checkpoint={tmp_path}/run", *OF_TEXTS[layout], f"hydra.run.dir={tmp_path}/p")
    rows = lines(tmp_path, "p")
    assert rows == [pytest.approx(row, rel=1e-5) for row in result.predict("test")]

    from data.text import Text

    data = Text(root=f"{texts}/text.txt", seq_len=16)
    data.prepare()
    inputs, targets = data.test.read(np.arange(len(data.test)), 0)
    logits = torch.from_numpy(result.predict(inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).sum(1)
    assert [row["tokens"] for row in rows] == [16] * len(rows) and len(rows) % 6
    assert [row["loss"] for row in rows] == pytest.approx(loss.tolist(), rel=1e-5)
    assert result.summary["test_loss"] == pytest.approx(float(loss.sum()) / targets.numel(), rel=1e-5)
    assert result.summary["test_ppl"] == pytest.approx(result.summary["test_perplexity"], rel=1e-4)  # float32 sums
    assert result.summary["test_right"] == pytest.approx(float(right(logits, targets)), rel=1e-5)


@pytest.mark.slow
def test_packed_rows_are_predicted_each_alone_and_packed_text_by_row(tmp_path, texts):
    packed = {"jsonl": ["data=jsonl", f"data.root={texts}/rows.jsonl", "data.field=[q,a]"]}
    packed["text"] = ["data=text", f"data.root={texts}/text.txt"]
    for name, words in packed.items():
        result = train(*TINY, *words, "data.packing=true", *OF_TEXTS["single"], f"hydra.run.dir={tmp_path}/{name}")
        rows = result.predict("test")
        assert [row.get("id") for row in rows][:1] == (["row-19"] if name == "jsonl" else [None])
        train("mode=predict", f"checkpoint={tmp_path}/{name}", f"hydra.run.dir={tmp_path}/{name}-p")
        assert lines(tmp_path, f"{name}-p") == [pytest.approx(row, rel=1e-5) for row in rows]
        total, tokens = (sum(row[key] for row in rows) for key in ("loss", "tokens"))
        assert result.summary["test_loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "pipelined"])
def test_of_rows_with_answers_the_answers_are_generated(tmp_path, texts, layout):
    """Beside a plain greedy loop without a cache."""
    words = ["data=jsonl", f"data.root={texts}/rows.jsonl", "data.field=q", "data.answer=a", *OF_TEXTS[layout]]
    result = train(*TINY, *words, "train.steps=40", "optim.lr=0.003", f"hydra.run.dir={tmp_path}/run")
    settings = ["sample.temperature=0", "sample.tokens=4"]
    train("mode=predict", f"checkpoint={tmp_path}/run", *settings, *OF_TEXTS[layout], f"hydra.run.dir={tmp_path}/p")
    rows = lines(tmp_path, "p")
    assert [row["id"] for row in rows] == ["row-19", "row-39", "row-59"] and rows[0]["answer"] == "no"
    assert rows[0]["prompt"] == "19 and 1?\n"
    assert result.predict("test", *settings) == rows
    from data.vocabulary import GPT2Vocabulary

    vocabulary = GPT2Vocabulary()
    for row in rows:
        (tokens,), drawn = vocabulary.encode_texts([row["prompt"]]), []
        while len(drawn) < 4 and vocabulary.end not in drawn:
            logits = result.predict(np.array([[*tokens, *drawn]]))
            drawn.append(int(logits[0, -1, : vocabulary.size].argmax()))
        drawn = drawn[: drawn.index(vocabulary.end)] if vocabulary.end in drawn else drawn
        assert row["prediction"] == vocabulary.decode(drawn)


@pytest.mark.slow
def test_a_misspelt_class_of_torchmetrics_is_named_before_the_first_step(tmp_path, samples):
    for metrics, message in {
        "[MulticlassAURCO]": "no class MulticlassAURCO; did you mean .*MulticlassAUROC",
        "[{_target_: AUROC, avrage: macro}]": "avrage",
        "[Accuracy]": "has a number accuracy already",
        "[{_target_: MeanSquaredError}]": "cannot take outputs \\[18, 3\\] with targets \\[18\\]",
    }.items():
        with pytest.raises(UserError, match=message):
            run(tmp_path, samples, f"metrics={metrics}")
    with pytest.raises(UserError, match="train.monitor=val_auroc is not a number"):
        run(tmp_path, samples, "metrics=[F1Score]", "train.monitor=val_auroc")


@pytest.mark.slow
def test_a_checkpoint_keeps_classes_of_torchmetrics_and_its_functions_must_be_typed_again(tmp_path, samples):
    classes = "{_target_: F1Score, average: macro}, {_target_: torchmetrics.AUROC}"
    given = {"model": network(), "loss": nn.CrossEntropyLoss(), "data": samples}
    words = ["mode=eval", f"checkpoint={tmp_path}/run", f"hydra.run.dir={tmp_path}/eval"]
    result = run(tmp_path, samples, f"metrics=[{classes}]")
    assert train(*words, **given).summary["test_f1_score"] == result.summary["test_f1_score"]
    run(tmp_path, samples, f"metrics=[{classes}, {{_target_: {__name__}.spread}}]", name="own")
    with pytest.raises(UserError, match=f"{__name__}.spread, which is not allowed.*type metrics= again"):
        train("mode=eval", f"checkpoint={tmp_path}/own", **given)
