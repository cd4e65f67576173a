"""MFU is PaLM's, where the peak of the device is known."""

import pytest
from composed import config, records, run

from models.gpt2_sizes import SIZES
from training.reporting import utilization
from training.reporting.console import describe_results
from training.reporting.utilization import peak_of, seconds_at_peak
from training.run.prepare import prepare

GPT2 = ["model=gpt2", "model.size=tiny", "data.vocabulary=words", "model.vocab_size=384", "data.seq_len=32"]
GPT2 += ["train.epochs=null", "train.precision=fp32", "train.steps=5", "train.global_batch_size=8"]
PEAK, LENGTH, VOCABULARY = 1e9, 32, 384


def palm() -> float:
    """6 N + 12 L H Q T, where N counts what is multiplied: the matrices of the blocks, and the head."""
    size = SIZES["tiny"]
    return (
        6 * (12 * size.n_layer * size.n_embd**2 + VOCABULARY * size.n_embd) + 12 * size.n_layer * size.n_embd * LENGTH
    )


@pytest.mark.parametrize(
    "device, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16_residual", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA A100-SXM4-40GB", "fp16", 312e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA B200", "fp64", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_a_peak_is_that_of_the_very_device(device, precision, peak):
    assert peak_of(device, precision) == peak


@pytest.mark.slow
def test_the_record_and_the_summary_have_it_where_the_peak_is_known(text, tmp_path, monkeypatch, capfd):
    words = [*GPT2, *text, "parallel.chunks=2", "train.eval_every=null"]
    summary = run(tmp_path / "unknown", *words)
    assert summary["mfu"] is None and not any("mfu" in record for record in records(tmp_path / "unknown"))
    assert "MFU" not in describe_results(summary, tmp_path) + capfd.readouterr().err
    monkeypatch.setattr(utilization, "peak_of", lambda device, precision: PEAK)
    summary = run(tmp_path / "known", *words)
    for record in (*records(tmp_path / "known"), summary):
        assert record["mfu"] == pytest.approx(palm() * record["tokens_per_s"] / PEAK, rel=1e-9)
    assert f"{summary['mfu']:.1%} MFU" in describe_results(summary, tmp_path) and "% MFU" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, times",
    [
        (["parallel=pipe_ddp", "parallel.dp=2"], 1 / 4),
        (["parallel=tensor"], 1 / 2),
        (["parallel=model_parallel", "parallel.devices=[cpu,cpu]"], 1),
        (["train.activation_checkpointing=true"], 1),
        (["train.tf32=true"], None),
    ],
)
def test_it_divides_by_all_devices_and_leaves_recomputed_work_out(text, monkeypatch, words, times):
    monkeypatch.setattr(utilization, "peak_of", lambda device, precision: PEAK)
    setup = prepare(config(*GPT2, *text, *words))
    assert seconds_at_peak(setup) == (times and pytest.approx(times * palm() / PEAK, rel=1e-9))
    setup.data.pairs = True  # whose reference has no backward
    assert seconds_at_peak(setup) is None
