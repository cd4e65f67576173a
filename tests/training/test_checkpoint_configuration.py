"""A checkpoint is enough: evaluation, samples, exports and resuming take their configuration from it."""

import json

import pytest
from composed import QUIET, config, run, steps

from common.errors import CheckpointError, TrainingError
from conf.composition import compose, quote_values
from conf.instantiate import to_config, to_dict
from train import main
from training.app import saved_config
from training.run import kept
from training.run import run as training


@pytest.fixture(scope="module")
def words(text, tmp_path_factory):
    """A run of a small transformer on words, some of whose values are not the defaults."""
    folder = tmp_path_factory.mktemp("words") / "a run"
    sizes = ["model=transformer", "model.d_model=16", "model.d_hid=16", "model.n_layer=1", *text]
    run(folder, *sizes, "train.steps=2", "train.global_batch_size=4", "train.eval_batches=1", "optim.lr=0.01", "seed=5")
    return folder


def composed(*typed: str) -> dict:
    """What train.py composes of a command line."""
    words = [*QUIET, *quote_values(typed)]
    return to_config(to_dict(compose(words, saved=saved_config(words))))


def test_a_checkpoint_brings_the_model_the_data_and_how_they_were_trained(words):
    for path in (words, words / "checkpoints", words / "checkpoints" / "step-00000002"):
        cfg = composed("mode=eval", f"checkpoint='{path}'")
        assert (cfg.model.name, cfg.model.d_model, cfg.data.seq_len, cfg.seed) == ("transformer", 16, 32, 5)
        assert cfg.data._target_ == "data.text.Text" and cfg.data.vocabulary == "words"
        assert (cfg.optim.lr, cfg.scheduler._target_) == (0.01, "training.optimizer.CosineWarmup")
        assert cfg.train.global_batch_size == 4
        assert cfg.train.eval_batches is None, "the whole split"
        assert cfg.parallel.name == "single"


def test_what_is_typed_wins_over_the_checkpoint(words):
    named = f"checkpoint='{words}'"
    cfg = composed("mode=eval", named, "model=transformer", "train.eval_batches=3", "seed=1", "data.num_workers=2")
    assert (cfg.train.eval_batches, cfg.seed, cfg.data.num_workers, cfg.model.d_model) == (3, 1, 2, 16)
    cfg = composed(named, "mode=eval", "data=stdlib", "optim=sgd", "parallel=pipe_ddp", "debug=limit")
    assert (cfg.data._target_, cfg.data.seq_len, cfg.optim._target_) == ("data.stdlib.Stdlib", 256, "torch.optim.SGD")
    assert (cfg.parallel.name, cfg.train.eval_batches, cfg.model.d_model) == ("pipe_ddp", 1, 16)


def test_the_console_shows_what_was_typed_and_not_all_that_the_checkpoint_brings(words, tmp_path, capsys):
    typed = [f"checkpoint='{words}'", "mode=eval", "data.seq_len=16", "parallel.threads=1", "device=cpu"]
    assert main([*typed, "logger=none", f"hydra.run.dir={tmp_path}/run"]) == 0
    choices, changes = capsys.readouterr().out.partition("\n\n")[0].split("\n", 1)
    chosen = "model=transformer data=text optim=adamw scheduler=cosine_warmup"
    assert choices == f"{chosen} parallel=single launcher=local logger=none"
    shown = " ".join(changes.split()).replace(str(words), "RUN").split()
    assert sorted(shown) == sorted([*typed[1:], "checkpoint='RUN'"])


def test_the_keys_that_it_brings_have_their_names(words):
    with pytest.raises(Exception, match="model.dmodel"):
        composed(f"checkpoint='{words}'", "model.dmodel=3")


def test_a_resumed_run_needs_no_more_than_the_path(words, tmp_path):
    cfg = composed(f"train.resume='{words}'", "train.steps=3")
    assert (cfg.model.name, cfg.train.steps, cfg.train.resume) == ("transformer", 3, str(words))
    training(cfg, tmp_path)
    assert [line["step"] for line in steps(tmp_path)] == [3]


def test_a_path_may_begin_with_the_home_folder(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(words.parent))
    typed = ["train.resume='~/a run'", "train.steps=3", "parallel.threads=1", "device=cpu", "logger=none"]
    assert main([*typed, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert [line["step"] for line in steps(tmp_path / "run")] == [3]


def test_auto_takes_it_from_the_run_directory(words, tmp_path):
    here = [f"hydra.run.dir='{words}'", "train.resume=auto"]
    assert saved_config(here).words[:2] == ["model=transformer", "data=text"]
    nothing_yet = [f"hydra.run.dir='{tmp_path}'", "train.resume=auto", "model=gpt2"]
    assert saved_config(nothing_yet) is None


@pytest.mark.parametrize("typed", [["model=toy"], ["-m", "model=transformer,toy"]])
def test_another_model_is_a_contradiction_that_names_both(words, typed):
    with pytest.raises(TrainingError, match="a run holds model=transformer, and model=.*toy was typed; leave model="):
        saved_config(["mode=eval", f"checkpoint='{words}'", *typed])


@pytest.mark.parametrize("mode", ["eval", "sample", "export"])
def test_sizes_that_do_not_fit_are_named_beside_those_of_the_checkpoint(words, tmp_path, mode):
    from training.app import execute

    cfg = composed(f"mode={mode}", f"checkpoint='{words}'", "model.d_model=32")
    with pytest.raises(CheckpointError, match=r"model.d_model=16 in the checkpoint and 32 in this command"):
        execute(cfg, tmp_path, None)


def test_a_sweep_over_checkpoints_needs_them_to_agree(words, tmp_path):
    run(tmp_path / "toy", "train.epochs=null", "train.steps=1")
    same = f"checkpoint='{words}','{words}/checkpoints/latest'"
    assert saved_config(["-m", same, "mode=eval"]).words[:2] == ["model=transformer", "data=text"]
    with pytest.raises(TrainingError, match="have different configurations; name one of them at a time"):
        saved_config(["-m", f"checkpoint='{words}','{tmp_path}/toy'", "mode=eval"])


def test_a_checkpoint_keeps_no_secret(words, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "q8Zr-secret-77")
    cfg = config("model=gpt2", "model.size=tiny", "data=text", "data.root=/texts/q8Zr-secret-77")
    assert "root" not in kept(cfg)["data"] and "secret" not in json.dumps(kept(cfg))
    assert kept(cfg)["model"]["size"] == "tiny"
    manifest = words / "checkpoints" / "latest" / "manifest.json"
    assert json.loads(manifest.read_text())["config"]["data"]["seq_len"] == 32


def test_a_reference_in_a_foreign_checkpoint_is_not_followed(tmp_path, monkeypatch):
    from training.checkpoint.files import with_checksum

    monkeypatch.setenv("HOME_OF_SECRETS", "found out")
    run(tmp_path / "toy", "train.epochs=null", "train.steps=1")
    path = tmp_path / "toy" / "checkpoints" / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["model"]["init_from"] = "${oc.env:HOME_OF_SECRETS}"
    path.write_text(json.dumps(with_checksum(manifest)))
    assert composed(f"checkpoint='{tmp_path}/toy'").model.init_from == "${oc.env:HOME_OF_SECRETS}"


def test_training_from_a_checkpoint_says_how_to_go_on(words, tmp_path):
    from training.app import execute

    with pytest.raises(TrainingError, match="to go on with its training: train.resume="):
        execute(composed(f"checkpoint='{words}'"), tmp_path, None)
