"""Saving beside the training: what is written is the step's own, errors are told, the best and the newest stay.
Resuming what is damaged: it is named, and the newest whole checkpoint is taken in its place."""

import json
import os
import re
import shutil
import signal
import socket
import time
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial, reduce
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from composed import for_rank, losses, records, rewrite_manifest, run, run_on_rank, same_bits, steps
from safetensors.torch import load_file, save_file
from slow_cases import with_slow

from common.errors import CheckpointError, LaunchError, TrainingError, UserError
from models import toy
from models.gpt2 import gpt2
from models.lora import adapt
from models.preference import prefer
from parallel.mesh import SHARDS, Mesh
from parallel.pieces import Piece
from training.checkpoint import load, save
from training.checkpoint.files import Checkpoint, is_usable, sha256
from training.checkpoint.init_from import not_drawn
from training.optimizer import Optimizer
from training.reporting.loggers import Loggers
from training.reporting.recorder import Recorder
from training.run import rank as run_module
from training.run.checks import ranks as rank_checks
from training.run.loop import Loop

STEPS = ["train.epochs=null", "train.steps=6", "optim.momentum=0.9"]
EVERY_2 = [*STEPS, "train.checkpoint_every=2", "train.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def plainly(tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("plainly")
    run(folder, *EVERY_2)
    return folder


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("memory", [float("inf"), 0], ids=["enough", "too little for a copy"])
def test_training_goes_on_while_a_copy_is_written_and_waits_where_there_is_none(tmp_path, plainly, monkeypatch, memory):
    real, seen = save.write_file, []

    def slowly(path, *args):
        """The first checkpoint's files are written only after the training has done another step, if it ever does."""
        if "step-00000002" in str(path):
            deadline = time.monotonic() + (60 if memory else 0.5)
            while records(tmp_path)[-1]["step"] < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(records(tmp_path)[-1]["step"])
        return real(path, *args)

    monkeypatch.setattr(save, "write_file", slowly)
    monkeypatch.setattr(save, "available_memory", lambda: memory)
    run(tmp_path, *EVERY_2)
    assert min(seen) >= 3 if memory else max(seen) == 2
    assert same_bits(tmp_path, plainly, 2, 4, 6)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000004", "step-00000006"]


def test_what_a_killed_run_left_half_written_is_cleaned_up(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in (".step-00000004.tmp", ".step-00000002.removed.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model-00.safetensors").write_bytes(b"half")
    run(tmp_path, *STEPS)
    assert names(tmp_path) == ["best", "latest", "step-00000006"]


# -- where there are no links ----------------------------------------------------------------------------------------


def refuse_links(monkeypatch, error):
    def symlink(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, "symlink", symlink)


NO_LINKS = [PermissionError(1, "Operation not permitted"), OSError(95, "Not supported"), NotImplementedError()]


@pytest.mark.parametrize("error", NO_LINKS, ids=lambda error: type(error).__name__)
def test_without_symbolic_links_old_checkpoints_are_removed_and_latest_and_best_are_found(
    tmp_path, monkeypatch, caplog, error
):
    refuse_links(monkeypatch, error)
    words = ["train.eval_every=1", "train.checkpoint_every=1", "train.keep_checkpoints=2", "optim.lr=3.0"]
    run(tmp_path, *STEPS, *words)
    assert len([record for record in caplog.records if "has no links" in record.message]) == 1
    found = {line["step"]: line["val_loss"] for line in records(tmp_path) if "val_loss" in line}
    best = min(found, key=found.get)
    assert best < 5, "else this test shows nothing"
    assert names(tmp_path) == [f"step-{n:08d}" for n in (best, 5, 6)]
    for name, number in {"": 6, "checkpoints": 6, "checkpoints/latest": 6, "checkpoints/best": best}.items():
        assert Checkpoint.find(tmp_path / name).step == number, name
    run(tmp_path, *STEPS, *words, "train.resume=auto", "train.steps=7")
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert names(tmp_path) == [f"step-{n:08d}" for n in (best, 6, 7)]


def test_links_that_can_no_longer_be_changed_do_not_lead_to_older_ones(plainly, tmp_path, monkeypatch):
    shutil.copytree(plainly, tmp_path / "run", symlinks=True)
    refuse_links(monkeypatch, NO_LINKS[0])
    run(tmp_path / "run", *EVERY_2, "train.resume=auto", "train.steps=8")
    assert Checkpoint.find(tmp_path / "run").step == 8


def test_a_run_whose_folder_was_copied_with_its_links_followed_goes_on(plainly, tmp_path):
    folder = shutil.copytree(plainly, tmp_path / "run", symlinks=False)
    assert (folder / "checkpoints" / "latest" / "manifest.json").exists()
    run(folder, *EVERY_2, "train.resume=auto", "train.steps=8")
    assert os.readlink(folder / "checkpoints" / "latest") == "step-00000008"
    assert Checkpoint.find(folder).step == 8
    assert "unused-latest" in names(folder)


def test_the_next_update_waits_until_the_tensors_of_the_optimizer_are_copied(tmp_path, plainly, monkeypatch):
    real = save._Save._write

    def late(self):
        time.sleep(0.2)  # some steps
        real(self)

    monkeypatch.setattr(save._Save, "_write", late)
    run(tmp_path, *EVERY_2)
    for number in (2, 4, 6):
        assert Checkpoint(step(tmp_path, number)).files == Checkpoint(step(plainly, number)).files


def test_weights_that_a_checkpoint_has_are_not_drawn_before(plainly, tmp_path, monkeypatch):
    drawn, real = [], toy.reset_parameters
    monkeypatch.setattr(toy, "reset_parameters", lambda *given: drawn.append(given) or real(*given))
    for words in ([f"train.resume='{plainly}'", "train.steps=8"], ["mode=eval", f"checkpoint='{plainly}'"]):
        run(tmp_path / words[0][:5], *EVERY_2, *words)
        assert not drawn
    run(tmp_path / "anew", *EVERY_2)
    assert drawn


def test_what_no_checkpoint_has_is_drawn_all_the_same():
    model = gpt2(size="tiny", n_layer=1, vocab_size=50)
    chain = prefer(adapt(model, 2, 4, 0.0, ["c_attn"], modules_to_save=["ln_f"]))  # frozen weights, and references
    for each in (chain, prefer(model)):
        whole = each.build(each.names, 7, torch.device("cpu")).state_dict()
        rest = not_drawn(whole.keys() - each.unsaved, each).build(each.names, 7, torch.device("cpu")).state_dict()
        assert each.unsaved and all(torch.equal(rest[name], whole[name]) for name in each.unsaved)


# -- several ranks ---------------------------------------------------------------------------------------------------


def run_with_a_fault(tree, folder, meeting, steps, fault):
    """On each rank of a pool: a run whose rank 1 cannot write the checkpoints of some steps. What is said of them."""
    real, warned = save.write_file, []

    def faulty(path, *args):
        mine = dist.get_rank() == 1 and path.name.startswith("model")
        if not (mine and any(f"step-{step:08d}" in str(path) for step in steps)):
            return real(path, *args)
        if fault == "full":
            raise OSError(28, "No space left on device")
        time.sleep(fault if fault != "lost" else 0)
        real(path, *args)
        if fault == "lost":  # a part of the last tensor, as between two machines that share a page
            with open(path, "r+b") as file:
                file.seek(-64, os.SEEK_END)
                file.write(bytes(64))

    class Noted(save.Checkpointer):
        warn = property(lambda self: warned.append, lambda self, _: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_file", faulty)
        patch.setattr(run_module, "Checkpointer", Noted)
        try:
            run_on_rank(tree, folder, meeting)
            return warned
        except CheckpointError as error:
            return str(error)


FULL = "of step {step} could not be written: rank 1: [Errno 28] No space left"


CANNOT_WRITE = [
    # The training goes on, and the next checkpoint is written; after the last one there is none.
    pytest.param("pipelined", 2, "full", FULL, ["best", "latest", "step-00000004", "step-00000006"],
                 marks=pytest.mark.slow),
    pytest.param("fsdp", 2, "full", FULL, ["best", "latest", "step-00000004", "step-00000006"],
                 marks=pytest.mark.slow),
    pytest.param("pipelined", 6, "full", FULL, ["latest", "step-00000002", "step-00000004"], marks=pytest.mark.slow),
    pytest.param("pipelined", 4, 6.0, "it waited until all ranks had written their files (parallel.timeout_s)",
                 ["best", "latest", "step-00000002", "step-00000006"], marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("layout, step, fault, says, left", CANNOT_WRITE)
def test_a_rank_that_cannot_write_is_named_by_all(ranks, tmp_path, layout, step, fault, says, left):
    task = for_rank(tmp_path, *EVERY_2, f"parallel={layout}", "parallel.dp=null", "parallel.timeout_s=4")
    for one in ranks.run(2, run_with_a_fault, *task, [step], fault):
        (text,) = [one] if step == 6 else one
        assert says.format(step=step) in text
        assert "MiB are free at" in text or fault != "full"
    assert names(tmp_path) == left


def test_what_a_file_system_loses_of_one_rank_is_noticed_before_anything_old_is_removed(ranks, tmp_path):
    run(tmp_path, *EVERY_2, "train.steps=2")
    words = ["parallel=fsdp", "parallel.dp=2", "train.keep_checkpoints=1", "train.resume=auto"]
    for said in ranks.run(2, run_with_a_fault, *for_rank(tmp_path, *EVERY_2, *words), [4, 6], "lost"):
        assert "step-00000006.tmp/model-00.safetensors of " in said
        assert "is not what its ranks have written" in said and "the file system lost a part of it" in said
    assert names(tmp_path) == ["best", "latest", "step-00000002"]


@pytest.mark.parametrize("shared", [True, False])
def test_only_a_file_that_several_ranks_write_is_opened_for_synchronous_writes(tmp_path, monkeypatch, shared):
    """So Linux's NFS client sends what was written, and not the rest of its page."""
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: opened.append(flags) or real(path, flags, *rest))
    ranges = (slice(0, 2),), (slice(0, 3),)
    piece = Piece(torch.ones(2, 3), ranges, (4, 3), (SHARDS,) if shared else ())
    save.write_file(tmp_path / "model-00.safetensors", {"weight": piece}, Mesh({}))
    assert bool(opened[0] & os.O_DSYNC) == shared


def run_and_count_writers(tree, folder, meeting, hosts):
    """On each rank of a pool: how many processes on its machine copy at the same time, as each save counts them."""
    real_copy, counted, own = save.copy_tensors, set(), hosts[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: own)
        patch.setattr(
            save, "copy_tensors", lambda files, n, *rest, **how: counted.add(n) or real_copy(files, n, *rest, **how)
        )
        run_on_rank(tree, folder, meeting)
    return counted


WRITERS = [
    ("fsdp", ["a", "a"], [{2}, {2}]),
    ("fsdp", ["a", "b"], [{1}, {1}]),
    pytest.param("pipelined", ["a", "b"], [{1}, {1}], marks=pytest.mark.slow),
    ("ddp", ["a", "a"], [{1}, {1}]),  # one of them writes
]


@pytest.mark.parametrize("layout, hosts, writers", WRITERS)
def test_memory_for_copies_is_counted_by_machine(ranks, tmp_path, layout, hosts, writers):
    task = for_rank(tmp_path, *EVERY_2, f"parallel={layout}", "parallel.dp=null")
    assert ranks.run(2, run_and_count_writers, *task, hosts) == writers


# -- a run directory that is not shared --------------------------------------------------------------------------------


def run_in_own_folder(tree, folder, meeting, checked=True):
    """On each rank of a pool: one run, in another run directory on each. The summary, or what went wrong."""
    own, said = Path(f"{folder}-of-rank-{dist.get_rank()}"), StringIO()
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(rank_checks, "_APPEARS_S", 0.3)
        if not checked:
            patch.setattr(run_module, "check_run_directory", lambda *_: None)
        try:
            return run_on_rank(tree, str(own), meeting), said.getvalue()
        except (CheckpointError, LaunchError) as error:
            return str(error)


def apart(ranks, folder, layout, *words, **options):
    """What each of two ranks has to say, or returns, of a run whose directory they do not share."""
    task = for_rank(folder / "run", *EVERY_2, f"parallel={layout}", "parallel.dp=null", *words)
    return ranks.run(2, run_in_own_folder, *task, **options)


@pytest.mark.parametrize("layout", with_slow(["pipelined", "fsdp"], ["pipelined"]))
def test_ranks_that_write_checkpoints_to_other_directories_are_named_before_the_first_step(ranks, tmp_path, layout):
    for said in apart(ranks, tmp_path, layout):
        assert re.search(r"rank 1 \(.*\) does not see rank 0's run directory .*/run-of-rank-\d \(", said)
        assert "set hydra.run.dir to a directory that all machines share" in said
    assert not list(tmp_path.glob("*/metrics.jsonl")) and not list(tmp_path.glob("*/.shared-*"))


def test_ranks_that_only_read_checkpoints_are_warned_about(ranks, tmp_path):
    (one, said), (two, _) = apart(ranks, tmp_path, "ddp")
    assert one["steps"] == two["steps"] == 6
    assert "does not see rank 0's run directory" in said and "the run cannot be resumed or restarted" in said


@pytest.mark.parametrize(
    "layout, says",
    [pytest.param("pipelined", "that rank 1 has written", marks=pytest.mark.slow), ("fsdp", "is not what its ranks")],
)
def test_a_directory_that_is_no_longer_shared_costs_no_older_checkpoint(ranks, tmp_path, layout, says):
    for rank in (0, 1):
        run(tmp_path / f"run-of-rank-{rank}", *EVERY_2, "train.steps=2")
    for said in apart(ranks, tmp_path, layout, "train.keep_checkpoints=1", "train.resume=auto", checked=False):
        assert "of step 6 could not be written" in said and says in said
        assert "share the run directory" in said
    assert names(tmp_path / "run-of-rank-0") == ["best", "latest", "step-00000002"]


# -- resuming what is damaged -----------------------------------------------------------------------------------------


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


# The file, and what it holds afterwards; None where it is deleted.
DAMAGES = {
    "truncated": ("model-00.safetensors", lambda content: content[:-1]),
    "zeros": ("model-00.safetensors", lambda content: bytes(len(content))),
    "a bit": ("optimizer-00.safetensors", flipped),
    "no file": ("optimizer-00.safetensors", None),
    "half a manifest": ("manifest.json", lambda content: content[: len(content) // 2]),
    "another manifest": ("manifest.json", lambda content: content.replace(b'"step": 6', b'"step": 4')),
    "no manifest": ("manifest.json", None),
}


def damage(folder, kind):
    """The path of the file that is no longer what it was."""
    name, change = DAMAGES[kind]
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if change is not None:
        (folder / name).write_bytes(change(content))
    return folder / name


@pytest.fixture
def copy(plainly, tmp_path):
    """The same, as if it had been killed after step 6; to be damaged."""
    folder = shutil.copytree(plainly, tmp_path / "run", symlinks=True)
    (folder / "summary.json").unlink()
    return folder


def step(folder, number):
    return folder / "checkpoints" / f"step-{number:08d}"


def test_whatever_is_damaged_the_newest_whole_one_is_found_and_the_damaged_one_named(plainly, tmp_path):
    for kind in DAMAGES:
        folder = shutil.copytree(plainly / "checkpoints", tmp_path / kind, symlinks=True)
        path, said = damage(folder / "step-00000006", kind), []
        assert Checkpoint.newest(folder, verify=True, warn=said.append).step == 4, kind
        assert len(said) == 1 and str(path.parent if kind == "no manifest" else path) in said[0]


@pytest.mark.parametrize(
    "damaged, begins", [((6, 4), "{folder}/step-00000002"), ((6, 4, 2), "this run starts at step 1")]
)
def test_auto_goes_back_as_far_as_it_must_and_says_so(copy, plainly, capsys, damaged, begins):
    paths = [damage(step(copy, number), "truncated") for number in damaged]
    run(copy, *EVERY_2, "train.resume=auto")
    said = capsys.readouterr()
    warnings = [line for line in said.err.splitlines() if "it is not used" in line]
    assert len(warnings) == len(paths)
    assert all(line.startswith("warning: ") and str(path) in line for path, line in zip(paths, warnings, strict=True))
    assert begins.format(folder=step(copy, 2).parent) in said.out
    assert [line["step"] for line in records(copy) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(copy) == losses(plainly)
    assert os.readlink(copy / "checkpoints" / "latest") == "step-00000006"


def test_a_damaged_one_that_was_asked_for_is_an_error_that_names_a_whole_one(copy, tmp_path):
    path = damage(step(copy, 6), "a bit")
    with pytest.raises(CheckpointError) as error:
        run(tmp_path / "other", *EVERY_2, "train.steps=8", f"train.resume='{step(copy, 6)}'")
    assert str(path) in str(error.value)
    assert f"the newest whole one there is {step(copy, 4)}" in str(error.value)


CANNOT_GO_ON = [
    ("model.hidden=20", r"net1.weight has \(10, 10\), expected \(20, 10\)"),
    ("optim=adamw", r"was saved with optim torch.optim.SGD, this run has torch.optim.AdamW"),
    ("seed=1337", "is at step 6 and the run ends at step 6; set train.steps higher$"),
    ("train.epochs=0.01", "the run ends at step 2; set train.steps higher, and train.epochs=null: "),
]


@pytest.mark.parametrize("more, says", CANNOT_GO_ON)
def test_what_cannot_be_gone_on_from_is_an_error_that_says_why(plainly, tmp_path, more, says):
    recipe = [word for word in EVERY_2 if more != "optim=adamw" or "momentum" not in word]
    with pytest.raises(UserError, match=says):
        run(tmp_path / "run", *recipe, more, f"train.resume='{plainly}'")


def test_a_run_its_checkpoints_and_each_of_them_can_be_named(plainly):
    for name in ("", "checkpoints", "checkpoints/latest", "checkpoints/best", "checkpoints/step-00000006"):
        assert Checkpoint.find(plainly / name).step == 6


def test_going_back_to_an_older_one_leaves_the_newer_ones_under_another_name(copy, plainly, capsys):
    """Else a later train.resume=auto would go on from what this run has left behind."""
    run(copy, *EVERY_2, f"train.resume='{step(copy, 2)}'")
    assert losses(copy) == losses(plainly)
    assert "is kept as unused-step-00000006" in capsys.readouterr().err
    kept = {path.name for path in (copy / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink()}
    assert kept == {f"{prefix}step-{n:08d}" for n in (4, 6) for prefix in ("", "unused-")} | {"step-00000002"}


def test_a_command_that_is_refused_leaves_checkpoints_and_summary_as_they_were(copy, plainly, monkeypatch):
    def files():
        return sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))

    shutil.copy(plainly / "summary.json", copy)
    before = files()
    with pytest.raises(TrainingError, match="is at step 2 and the run ends at step 1"):
        run(copy, *EVERY_2, f"train.resume='{step(copy, 2)}'", "train.steps=1")
    assert files() == before
    monkeypatch.setattr(run_module, "changes", Mock(side_effect=TrainingError("other settings")))
    with pytest.raises(TrainingError, match="other settings"):
        run(copy, *EVERY_2, "train.resume=auto", "train.steps=8")
    assert {*before} <= {*files()}


def test_an_evaluation_that_is_started_again_has_each_number_once(plainly, tmp_path):
    for _ in range(2):
        run(tmp_path, *STEPS, "mode=eval", f"checkpoint='{plainly}'")
    assert [[name for name in line if name != "step"] for line in records(tmp_path)] == [["val_loss"], ["test_loss"]]


def run_and_be_killed(tree, folder, meeting, name):
    """On each rank of a pool: a run whose rank 0 is killed as it calls a function, or a method, for the first time."""
    owner, _, method = name.rpartition(".")
    owner = {"": run_module, "Recorder": Recorder, "Loggers": Loggers}[owner]
    if dist.get_rank() == 0:
        setattr(owner, method, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    run_on_rank(tree, folder, meeting)


@pytest.mark.parametrize(
    "moment", with_slow(["_test", "Recorder.close", "Loggers.finish"], {"_test", "Loggers.finish"})
)
def test_killed_anywhere_between_its_last_checkpoint_and_its_end_a_run_is_completed_by_the_same_command(
    ranks, tmp_path, moment
):
    words = [*STEPS, "parallel=ddp", "parallel.dp=2", "train.resume=auto", "logger=csv"]
    with pytest.raises(AssertionError, match="rank 0 of 2:\nthe process ended"):
        ranks.run(2, run_and_be_killed, *for_rank(tmp_path, *words), moment)
    assert (tmp_path / "summary.json").exists() == (moment == "Loggers.finish")
    (tmp_path / "checkpoints" / "latest").unlink()
    for _ in range(2):  # the third run has nothing to do
        first, second = ranks.run(2, run_on_rank, *for_rank(tmp_path, *words))
        assert first == second == json.loads((tmp_path / "summary.json").read_text())
        assert first["steps"] == 6 and first["test_loss"] is not None and first["first_loss"] == losses(tmp_path)[0]
        assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 7
        assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000006"


def test_a_run_that_is_complete_keeps_its_summary_and_computes_nothing(copy, plainly, monkeypatch):
    shutil.copy(plainly / "summary.json", copy)
    whole = json.loads((copy / "summary.json").read_text())
    monkeypatch.setattr(run_module, "evaluate_split", pytest.fail)
    assert run(copy, *EVERY_2, "train.resume=auto") == whole == json.loads((copy / "summary.json").read_text())
    assert whole["step_time_s"] > 0, "which only the process that has trained knows"
    with pytest.raises(TrainingError, match="is at step 6 and the run ends at step 4; set train.steps higher"):
        run(copy, *EVERY_2, "train.resume=auto", "train.steps=4")


# -- manifests that others have made -----------------------------------------------------------------------------------


def listed(name):
    return f"files {name}", {"bytes": 0, "sha256": "0" * 64}


MANIFEST, WEIGHTS = "manifest.json is damaged: ", "model-00.safetensors"


WRONG_ENTRIES = [
    ("progress", "x", MANIFEST),
    ("progress best_step", "x", MANIFEST),
    ("layout", "x", MANIFEST),
    (f"files {WEIGHTS} bytes", "x", MANIFEST),
    (f"files {WEIGHTS} sha256", None, "its sha256 is .* says None"),
    (*listed("/dev/zero"), "/dev/zero is not the name of a file in its folder"),
    (*listed(f"../step-00000004/{WEIGHTS}"), f"{WEIGHTS} is not the name of a file"),
    (*listed(".."), r"\.\. is not the name of a file in its folder"),
]


@pytest.mark.parametrize("entry, value, says", WRONG_ENTRIES)
def test_a_manifest_that_cannot_be_right_is_named(copy, entry, value, says):
    for number in (2, 4):
        shutil.rmtree(step(copy, number))
    set_in_manifest(step(copy, 6), entry, value)
    with pytest.raises(CheckpointError, match=says):
        run(copy, *EVERY_2, "train.steps=8", f"train.resume={step(copy, 6)}")


def set_in_manifest(folder, entry, value):
    *sections, key = entry.split()
    rewrite_manifest(folder, lambda manifest: reduce(dict.__getitem__, sections, manifest).update({key: value}))


@pytest.mark.parametrize("name", ["manifest.json", "model-00.safetensors", "a-link.safetensors"])
def test_a_pipe_or_a_device_in_a_checkpoint_is_named_and_not_read(copy, name):
    path = step(copy, 6) / name
    if name.startswith("a-link"):
        path.symlink_to("/dev/zero")
        set_in_manifest(step(copy, 6), *listed(name))
    else:
        path.unlink()
        os.mkfifo(path)
        if name.startswith("model"):
            set_in_manifest(step(copy, 6), *listed(name))
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*not a regular file"):
        Checkpoint(step(copy, 6), verify=True)


# -- whole, and of no use ------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Changes the tensors of a checkpoint's model and makes the manifest fit."""
    path = folder / "model-00.safetensors"
    save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)
    set_in_manifest(folder, f"files {path.name}", {"sha256": sha256(path), "bytes": path.stat().st_size})


OF_ANOTHER_KIND = {
    "int64": (lambda x: x.long(), "holds torch.int64, expected torch.float32"),
    "large": (lambda x: x.double() + 1e300, "holds torch.float64 numbers that are too large for torch.float32"),
}


@pytest.mark.parametrize("change, said", OF_ANOTHER_KIND.values(), ids=OF_ANOTHER_KIND)
def test_tensors_of_another_kind_are_refused(copy, tmp_path, change, said):
    rewrite(step(copy, 6), change)
    with pytest.raises(CheckpointError, match=f"net1.* {said}"):
        run(tmp_path / "other", *EVERY_2, f"train.resume={step(copy, 6)}")


def test_a_mask_of_minus_infinity_is_finite_enough_and_so_is_an_optimizer_that_overflows():
    assert is_usable("weight/exp_avg_sq", torch.tensor([float("inf")]))
    assert is_usable("mask", torch.tensor([0.0, float("-inf")]))
    assert not is_usable("weight", torch.tensor([0.0, float("inf")]))


def test_a_run_whose_weights_are_not_finite_keeps_its_good_checkpoints(tmp_path, monkeypatch):
    step_of_optimizer, done = Optimizer.step, []

    def diverge(self, lr):
        step_of_optimizer(self, lr)
        done.append(lr)
        if len(done) == 3:
            next(iter(self._parts[0].optimizer.param_groups[0]["params"])).data.view(-1)[0] = float("nan")

    monkeypatch.setattr(Optimizer, "step", diverge)
    keep = ["train.checkpoint_every=1", "train.keep_checkpoints=1", "train.max_skipped=2"]
    with pytest.raises(TrainingError, match="not finite for 3 steps in a row"):
        run(tmp_path / "long", *EVERY_2, *keep)
    done.clear()
    with pytest.raises(CheckpointError, match="of step 3 could not be written: net1.weight is not finite"):
        run(tmp_path / "short", *EVERY_2, *keep, "train.steps=3")
    for name in ("long", "short"):
        assert names(tmp_path / name) == ["latest", "step-00000002"]


LONG = ["train.epochs=null", "train.steps=12", "train.checkpoint_every=3", "train.eval_every=4"]


def test_a_run_directory_that_is_deleted_is_begun_anew_and_said(tmp_path, monkeypatch, caplog):
    record_step = Loop._record

    def delete(self, step, *args, **kwargs):
        if step == 8:
            self.checkpoints.wait_pending()
            shutil.rmtree(tmp_path / "run")
        record_step(self, step, *args, **kwargs)

    monkeypatch.setattr(Loop, "_record", delete)
    run(tmp_path / "run", *LONG)
    assert "metrics.jsonl was removed while this run writes to it" in caplog.text
    assert [line["step"] for line in steps(tmp_path / "run")] == [8, 9, 10, 11, 12]
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000012"
    monkeypatch.undo()
    run(tmp_path / "run", *LONG, "train.resume=auto", "train.steps=14")
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(8, 15))


def compare_checksums_for_long() -> str:
    """Rank 0 finds damage after two seconds, and ranks wait for each other for one."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    mesh = SimpleNamespace(gather=partial(Mesh({"replicas": 2}).gather, group=group))

    def work():
        if dist.get_rank() == 0:
            time.sleep(2)
            raise CheckpointError("model-00.safetensors is damaged")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as raised:
        patch.setattr(load, "_ASK_S", 0.2)
        load._together(mesh, work)
    return str(raised.value)


def test_ranks_wait_for_the_one_that_compares_checksums_however_long_it_takes(ranks):
    assert ranks.run(2, compare_checksums_for_long) == ["model-00.safetensors is damaged"] * 2
