"""The benchmark gpu: its dry run on the CPU goes through every part."""

import csv
import subprocess
from pathlib import Path

import pytest
import torch
from interpreters import python

from benchmarks import gpt2, gpu
from benchmarks.__main__ import run as benchmark
from benchmarks.trainer import PlainLoop, Trainer, adamw, configured, same_model, token_loss

# Of requirements.txt, what a machine with torch, Hydra and safetensors need not have.
NOT_CARRIED = ("wandb", "torchvision", "matplotlib", "tiktoken", "sklearn", "tqdm", "submitit", "PIL")
BLOCKED = f"""
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {NOT_CARRIED!r} else found(name, path, target)

PathFinder.find_spec = find_spec
"""


def rows_of(folder: Path, part: str) -> list[dict]:
    with open(folder / f"gpu_{part}.csv", newline="") as file:
        return list(csv.DictReader(file))


def check_rates(rows: list[dict], column: str) -> None:
    for row in rows:
        assert float(row[column].replace(",", "")) > 0
        assert float(row["fastest"]) <= float(row["seconds a step (median)"]) <= float(row["slowest"])


def check_shares(rows: list[dict]) -> None:
    for row in rows:
        shares = {name: float(row[name].rstrip("%")) for name in (*gpu.CATEGORIES, "elementwise", "idle")}
        # On a CPU operators follow each other, so that the shares are of a whole; threads of other tests are not seen.
        assert sum(shares.values()) == pytest.approx(100, abs=2)
        assert all(shares[name] > 0 for name in ("matmul", "attention", "elementwise"))


def test_parts_of_a_gpu_are_measured_in_processes_that_are_ended_in_time(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, timeout):
        commands.append(command[2:])
        if "peaks" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="parts that failed: peaks; their rows so far are in"):
        benchmark(["gpu", "pipelines", "peaks", "gpt2", "--output", str(tmp_path)])
    assert commands == [
        ["benchmarks", "gpu", part, "--output", str(tmp_path)] for part in ("pipelines", "peaks", "gpt2")
    ]
    assert "peaks took longer than 600 s" in capsys.readouterr().err


def test_without_a_gpu_the_error_names_the_dry_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU that torch can use; --dry-run goes through every part"):
        benchmark(["gpu", "peaks"])


def test_the_plain_loop_trains_as_this_project_does():
    words = ["model=gpt2", "model.size=tiny", "model.n_layer=1", "data.seq_len=16", "train.global_batch_size=4"]
    words += ["parallel.chunks=2", "logger=none", "device=cpu", "train.precision=fp32", "train.grad_clip=0.1"]
    trainer = Trainer(configured(words))
    model = same_model(trainer)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = trainer.optimizer.base_lr
    plain = PlainLoop(trainer, token_loss(model), optimizer)
    ours = [trainer.step(number) for number in (1, 2)]
    # It returns the loss of the last micro-batch alone: compare what was learned.
    for number in (1, 2):
        plain.step(number)
    (stage,) = trainer.strategy.stages
    trained = dict(model.named_parameters())
    far = [
        (parameter - trained[name]).norm() / parameter.norm()
        for name, parameter in stage.layers.named_parameters()
        if parameter.dim() > 1
    ]
    assert ours[1] != ours[0] and max(far) < 1e-3


def test_gpt2_and_its_profile_in_a_dry_run(tmp_path):
    benchmark(["gpu", "gpt2", "profile", "--dry-run", "--output", str(tmp_path)])
    rows = rows_of(tmp_path, "gpt2")
    assert [(row["run"], row["micro-batch"]) for row in rows] == [
        (run, size) for size in ("1", "2") for run in ("this project", "plain loop")
    ]
    check_rates(rows, "tokens/s")
    assert all(row["as fast as the plain loop"] == "1.00x" for row in rows[1::2])
    check_shares(rows_of(tmp_path, "profile"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_goes_through_every_part_where_only_hydra_and_psutil_were_carried_along(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    output = tmp_path / "results"
    line = ["-m", "benchmarks", "gpu", "--dry-run", "--output", output]
    ended = python(*line, timeout=800, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no row of torchvision's plain loop: No module named 'torchvision'" in ended.stdout
    assert {path.stem for path in output.glob("*.csv")} == {f"gpu_{part}" for part in gpu.PARTS}
    for part in ("gpt2", "gpt2_compiled", "pipelines"):
        check_rates(rows_of(output, part), "tokens/s")
    assert {row["compiled"] for row in rows_of(output, "gpt2_compiled")} == {"True"}
    check_rates(rows_of(output, "resnet50"), "images/s")
    assert [row["processes"] for row in rows_of(output, "pipelines")] == ["1", "2", "4"]
    check_shares(rows_of(output, "profile"))


@pytest.mark.slow
def test_resnet50_stands_beside_torchvision_s(tmp_path):
    benchmark(["gpu", "resnet50", "--dry-run", "--output", str(tmp_path)])
    rows = rows_of(tmp_path, "resnet50")
    assert [row["run"] for row in rows] == ["this project", "torchvision, plain loop"] * 2
    assert [row["images"].startswith("published") for row in rows] == [False, False, True, True]
    check_rates(rows, "images/s")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cutlass_80_tensorop_bf16_s16816gemm", "matmul"),
        ("aten::addmm", "matmul"),
        ("pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "cross entropy"),
        ("_row", "cross entropy"),  # this project's own
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD", "copies"),
        ("vectorized_layer_norm_kernel", "elementwise"),
    ],
)
def test_kernels_are_told_by_their_names(name, expected):
    assert gpu.category(name) == expected


def test_without_a_compiler_the_row_for_compile_is_left_out_with_its_reason(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not gpt2.has_compiler()
    assert "no row for compile: train.compile=true needs a C++ compiler" in capsys.readouterr().err


@pytest.mark.parametrize(
    "card, peak",
    [("NVIDIA L4", 121e12), ("NVIDIA L40S", None), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12)],
)
def test_a_peak_is_that_of_the_very_card(monkeypatch, card, peak):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    assert gpt2.datasheet_peak() == peak
