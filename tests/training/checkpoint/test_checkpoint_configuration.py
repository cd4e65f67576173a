"""A checkpoint is enough: evaluation, samples, exports and resuming take their configuration from it. The same command
resumes the same training; what is not typed comes from the checkpoint; what is typed wins."""

import json
import shlex
import shutil

import pytest
from composed import QUIET, config, execute, losses, records, rewrite_manifest, run, same_bits, steps, typed
from omegaconf import OmegaConf

from common.errors import CheckpointError, TrainingError
from conf import CHOSEN, TRAINED, options
from conf.composition import compose
from conf.instantiate import to_config, to_dict
from launchers import stopping
from launchers.stopping import Stopped
from train import main
from training.checkpoint.configuration import saved_config
from training.checkpoint.files import with_checksum
from training.run import rank
from training.run.rank import kept


@pytest.fixture(scope="module")
def words(text, tmp_path_factory):
    """A run of a small transformer on words, some of whose values are not the defaults."""
    folder = tmp_path_factory.mktemp("words") / "a run"
    sizes = ["model=transformer", "model.d_model=16", "model.d_hid=16", "model.n_layer=1", *text]
    run(folder, *sizes, "train.steps=2", "train.global_batch_size=4", "train.eval_batches=1", "optim.lr=0.01", "seed=5")
    return folder


def composed(*typed: str) -> dict:
    """What train.py composes of a command line."""
    words = [*QUIET, *typed]
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


def test_the_console_shows_what_was_typed_and_not_all_that_the_checkpoint_brings(words, tmp_path, capsys):
    typed = [f"checkpoint='{words}'", "mode=eval", "data.seq_len=16", "parallel.threads=1", "device=cpu"]
    assert main([*typed, "logger=none", f"hydra.run.dir={tmp_path}/run"]) == 0
    choices, changes = capsys.readouterr().out.partition("\n\n")[0].split("\n", 1)
    chosen = "model=transformer data=text optim=adamw scheduler=cosine_warmup"
    assert choices == f"{chosen} parallel=single launcher=local logger=none"
    shown = " ".join(changes.split()).replace(str(words), "RUN").split()
    assert sorted(shown) == sorted([*typed[1:], "checkpoint='RUN'"])


def test_a_path_may_begin_with_the_home_folder(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(words.parent))
    assert main(["train.resume='~/a run'", "train.steps=3", *QUIET, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert [line["step"] for line in steps(tmp_path / "run")] == [3]


def test_auto_takes_it_from_the_run_directory(words, tmp_path):
    here = [f"hydra.run.dir='{words}'", "train.resume=auto"]
    assert saved_config(here).words(here)[:2] == ["model=transformer", "data=text"]
    nothing_yet = [f"hydra.run.dir='{tmp_path}'", "train.resume=auto", "model=gpt2"]
    assert saved_config(nothing_yet) is None


@pytest.mark.parametrize("typed", [["model=toy"], ["-m", "model=transformer,toy"]])
def test_another_model_is_a_contradiction_that_names_both(words, typed):
    with pytest.raises(TrainingError, match="a run holds model=transformer, and model=.*toy was typed; leave model="):
        saved_config(["mode=eval", f"checkpoint='{words}'", *typed])


@pytest.mark.parametrize("mode", ["eval", "sample", "export"])
def test_sizes_that_do_not_fit_are_named_beside_those_of_the_checkpoint(words, tmp_path, mode):
    cfg = composed(f"mode={mode}", f"checkpoint='{words}'", "model.d_model=32")
    with pytest.raises(CheckpointError, match=r"model.d_model=16 in the checkpoint and 32 in this command"):
        execute(cfg, tmp_path, None)


def test_a_sweep_over_checkpoints_needs_them_to_agree(words, tmp_path):
    run(tmp_path / "toy", "train.epochs=null", "train.steps=1")
    same = f"checkpoint='{words}','{words}/checkpoints/latest'"
    assert saved_config(["-m", same, "mode=eval"]).words(["mode=eval"])[:2] == ["model=transformer", "data=text"]
    with pytest.raises(TrainingError, match="have different configurations; name one of them at a time"):
        saved_config(["-m", f"checkpoint='{words}','{tmp_path}/toy'", "mode=eval"])


def test_a_checkpoint_keeps_no_secret(words, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "q8Zr-secret-77")
    cfg = config("model=gpt2", "model.size=tiny", "data=text", "data.root=/texts/q8Zr-secret-77")
    assert "root" not in kept(cfg)["data"] and "secret" not in json.dumps(kept(cfg))
    assert kept(cfg)["model"]["size"] == "tiny"
    manifest = words / "checkpoints" / "latest" / "manifest.json"
    assert json.loads(manifest.read_text())["config"]["data"]["seq_len"] == 32


def test_what_was_masked_must_be_typed_again(words, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "somebody/model")
    cfg = to_config(to_dict(compose([*QUIET, "model=gpt2", "model.init_from=${oc.env:MODEL}"])))
    assert kept(cfg)["left_out"] == ["model.init_from"]

    def leave_out(manifest):
        del manifest["config"]["train"]["spike_factor"]
        manifest["config"]["left_out"] = ["train.spike_factor"]

    run = shutil.copytree(words, tmp_path / "run", symlinks=True)
    rewrite_manifest(run / "checkpoints" / "latest", leave_out)
    with pytest.raises(TrainingError, match=r"does not keep train.spike_factor, .*: type train.spike_factor= again"):
        composed("mode=eval", f"checkpoint={run}")
    assert composed("mode=eval", f"checkpoint={run}", "train.spike_factor=3").train.spike_factor == 3


def test_a_reference_in_a_foreign_checkpoint_is_not_followed(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME_OF_SECRETS", "found out")
    run, reference = shutil.copytree(words, tmp_path / "run", symlinks=True), "${oc.env:HOME_OF_SECRETS}"
    rewrite_manifest(run / "checkpoints" / "latest", lambda it: it["config"]["model"].update(init_from=reference))
    assert composed(f"checkpoint='{run}'").model.init_from == reference


def test_training_from_a_checkpoint_says_how_to_go_on(words, tmp_path):
    with pytest.raises(TrainingError, match="To continue its training, set train.resume="):
        execute(composed(f"checkpoint='{words}'"), tmp_path, None)


# -- the same command --------------------------------------------------------------------------------------------------

LAYOUT = {"parallel": "single", "dp": 1, "pp": 1, "chunks": 1, "precision": "fp32", "stages": [["net1"]]}


class Pretended:
    """A run directory with one checkpoint that has a configuration, and no weights."""

    def __init__(self, folder):
        self.folder = folder

    def trained_by(self, *words, **changed):
        """The sections that the run of a command line had; ``changed`` is written into its checkpoint instead."""
        config = kept(typed(*words).plain())
        for key, value in changed.items():
            section, _, name = key.partition("__")
            config[section][name] = value
        return self.holds(config)

    def holds(self, config):
        """Writes the checkpoint."""
        manifest = {"format": 2, "step": 1, "seed": 1, "optimizer": "torch.optim.SGD", "layout": LAYOUT, "tied": {}}
        manifest |= {"loss_scale": {"scale": 1.0, "good_steps": 0}, "progress": {}, "files": {}, "config": config}
        path = self.folder / "checkpoints" / "step-00000001"
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
        return {"recipe": None, **{name: value for name, value in config.items() if name != "choices"}}

    def resumed(self, *words):
        """The sections of a command line that resumes it."""
        arguments = [*words, f"train.resume='{self.folder}'"]
        tree = to_dict(compose(arguments, saved=saved_config(arguments)))
        tree["train"].pop("resume")
        return json.loads(json.dumps({name: tree[name] for name in ("seed", "recipe", *TRAINED)}))


@pytest.fixture
def a_run(tmp_path):
    return Pretended(tmp_path / "a run")


def flat(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: value for key, item in tree.items() for name, value in flat(item, f"{prefix}.{key}").items()}


def differing(one, other):
    """The keys whose values are not the same, with both."""
    one, other = flat(one), flat(other)
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}


# -- composition, key by key -----------------------------------------------------------------------------------------

COMMANDS = {
    "an optimizer typed over a model's rates": "model=gpt2 model.n_layer=4 model.n_embd=64 data.seq_len=48 "
    "train.precision=fp32 scheduler=constant optim=adamw optim.lr=0.001",
    "all groups typed": "model=transformer data=text data.root=x data.vocabulary=words optim=sgd optim.momentum=0.9 "
    "scheduler=step scheduler.every=3 seed=7 train.grad_clip=0.5",
    "keys added and taken away": "model=transformer optim=sgd optim.rates={fc:10,proj:3} ~optim.rates.proj",
    "an optimizer in an optimizer": "model=toy optim=muon optim.others.lr=0.1 optim.rates={net1:0.5}",
    "words of JSON": 'model=gpt2 model.extra_tokens={"<a>":"start"} model.size=tiny',
    "an experiment and a debug group": "experiment=classifier_cifar10 debug=overfit train.steps=7",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_same_command_resumes_the_same_training(a_run, command):
    assert_it_is_resumed(a_run, command.split())


def assert_it_is_resumed(a_run, command, **older):
    """By the same words, and by none."""
    trained = a_run.trained_by(*command, **older)
    assert not differing(trained, a_run.resumed(*command))
    assert not differing(trained, a_run.resumed())


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [f"{group}={name}" for group in ("model", "experiment") for name in options(group)])
@pytest.mark.parametrize("more", ["", "optim=adamw optim.lr=0.001", "optim=sgd scheduler=constant", "debug=overfit"])
def test_it_does_for_every_model_and_experiment_whatever_is_typed(a_run, chosen, more):
    assert_it_is_resumed(a_run, [chosen, *more.split(), "train.global_batch_size=4", "seed=3"])


def test_what_the_files_say_otherwise_now_does_not_count(a_run):
    older = {"optim__lr": 0.5, "optim__rates": {"mlp": 3.0}, "train__grad_clip": None, "data__seq_len": 24}
    assert_it_is_resumed(a_run, "model=gpt2 model.size=tiny optim=adamw".split(), **older)


def test_what_is_typed_wins_and_what_is_derived_from_it_follows(a_run):
    a_run.trained_by("model=gpt2", "model.size=tiny", "optim.lr=0.5", "scheduler=constant", "seed=3")
    resumed = a_run.resumed("train.global_batch_size=4", "optim.weight_decay=0.3", "scheduler=step")
    assert (resumed["optim"]["weight_decay"], resumed["optim"]["lr"], resumed["seed"]) == (0.3, 0.5, 3)
    assert resumed["data"]["columns"] == 4 and resumed["scheduler"]["_target_"] == "training.optimizer.Step"
    other = a_run.resumed("optim=sgd")["optim"]
    fresh = a_run.trained_by("model=gpt2", "model.size=tiny", "optim=sgd")["optim"]
    assert not differing(other, fresh), "another option starts from its own defaults, and from what the model brings"


def test_a_longer_first_run_keeps_the_rates_that_it_began_with(a_run):
    trained = a_run.trained_by("model=gpt2")
    resumed = a_run.resumed("model=gpt2", "train.steps=36")
    assert set(differing(trained, resumed)) == {".train.steps"} and trained["recipe"] == "first_run"


def test_an_experiment_that_the_run_had_not_wins_over_what_it_had(a_run):
    a_run.trained_by("model=transformer", "data=text", "data.root=x", "optim.lr=0.5", "model.dropout=0.3")
    resumed = a_run.resumed("experiment=transformer_wikitext2")
    assert resumed["optim"]["lr"] == 2.5e-3 and resumed["data"]["_target_"] == "data.wikitext2.WikiText2"
    a_run.trained_by("experiment=transformer_wikitext2", "optim.lr=0.5")
    resumed = a_run.resumed("experiment=transformer_wikitext2", "debug=limit")
    assert (resumed["optim"]["lr"], resumed["train"]["steps"], resumed["train"]["epochs"]) == (0.5, 3, None)


def test_an_option_of_ones_own_is_needed_again_only_to_be_typed(a_run, tmp_path):
    (tmp_path / "own" / "optim").mkdir(parents=True)
    (tmp_path / "own" / "optim" / "mine.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.3\nmomentum: 0.5\n")
    command = ["model=toy", "optim=mine", "optim.lr=0.2", f"--config-dir={tmp_path}/own"]
    composed_of = typed(*command)
    choices, cfg = to_dict(composed_of.plain())["command"]["choices"], composed_of.cfg
    trained = {name: to_dict(cfg[name]) for name in TRAINED} | {"seed": 1337, "recipe": None}
    trained["train"].pop("resume")
    a_run.holds({**json.loads(json.dumps({k: v for k, v in trained.items() if k != "recipe"})), "choices": choices})
    assert not differing(trained, a_run.resumed(*command))
    assert not differing(trained, a_run.resumed())


def test_a_checkpoint_chooses_among_options_and_does_nothing_else(a_run, monkeypatch, tmp_path):
    trained = a_run.trained_by("model=toy", "optim.lr=0.3")
    sections = {key: value for key, value in trained.items() if key != "recipe"}
    for option in ("../../x", "${oc.env:HOME}", "adamw", ["a", "b"], "sgd hydra.run.dir=x", None):
        a_run.holds({**sections, "choices": {**dict.fromkeys(CHOSEN, option), "experiment": option, "debug": option}})
        words = saved_config([f"train.resume='{a_run.folder}'"]).words([])
        assert set(words) <= {f"{group}={name}" for group in CHOSEN for name in options(group)}
        assert not differing(trained, a_run.resumed())
    a_run.holds({**sections, "launcher": {"setup": ["touch executed"]}, "hydra": {"callbacks": {"x": {}}}})
    words = [f"train.resume='{a_run.folder}'"]
    cfg = compose(words, with_hydra=True, saved=saved_config(words))
    assert "setup" not in cfg.launcher and "x" not in cfg.hydra.callbacks
    assert not differing(trained, a_run.resumed())


# -- real runs -------------------------------------------------------------------------------------------------------

RUN = "optim=adamw optim.lr=0.01 optim.rates={c_proj:0.2} scheduler=cosine_warmup train.steps=6 "
RUN += "train.checkpoint_every=3 "
RUN += "model=gpt2 model.n_layer=1 model.n_head=2 model.n_embd=16 model.block_size=16 model.dropout=0.1 data.seq_len=8 "
RUN += "train.global_batch_size=4 train.precision=fp32 train.eval_every=null sample.at_end=0 logger=none device=cpu "
RUN += "parallel.threads=1 train.keep_checkpoints=9"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run, and a copy of it as it was after the third step."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*RUN.split(), f"hydra.run.dir={folder}/whole"]) == 0
    shutil.copytree(folder / "whole", folder / "killed", symlinks=True)
    for left in ("summary.json", "metrics.jsonl"):
        (folder / "killed" / left).unlink()
    shutil.rmtree(folder / "killed" / "checkpoints" / "step-00000006")
    return folder


@pytest.mark.parametrize("typed", [RUN.split(), QUIET], ids=["as before", "nothing"])
def test_a_run_in_another_directory_goes_on_bit_for_bit(whole, tmp_path, capsys, typed):
    assert main([*typed, f"train.resume='{whole}/killed'", f"hydra.run.dir={tmp_path}/on"]) == 0
    assert losses(tmp_path / "on") == losses(whole / "whole")[3:] and same_bits(tmp_path / "on", whole / "whole", 6)
    assert "settings that differ" not in capsys.readouterr().err
    chained = json.loads((tmp_path / "on" / "checkpoints" / "latest" / "manifest.json").read_text())["config"]
    first = json.loads((whole / "whole" / "checkpoints" / "latest" / "manifest.json").read_text())["config"]
    assert chained == first, "what is resumed can be resumed"


@pytest.mark.parametrize("asked", [1, 2], ids=["before the loop", "before its first step"])
def test_a_run_that_is_stopped_at_once_says_what_goes_on_from_the_other_run(
    whole, tmp_path, capsys, monkeypatch, asked
):
    typed = [f"train.resume='{whole}/killed'", *QUIET, f"hydra.run.dir={tmp_path}/on"]
    calls = iter(range(1, 100))
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "wanted", lambda: next(calls) >= asked)
        assert main(typed) == stopping.EXIT_CODE
    said = capsys.readouterr().err
    again = "start it again with the same command" if asked == 1 else "the same command and train.resume=auto"
    assert again in said and (tmp_path / "on" / "checkpoints" / "step-00000003").exists() == (asked == 2)
    assert main([*typed, *["train.resume=auto"] * (asked == 2)]) == 0
    assert losses(tmp_path / "on") == losses(whole / "whole")[3:] and same_bits(tmp_path / "on", whole / "whole", 6)


def test_an_evaluation_that_is_stopped_is_started_again_with_its_command(whole, tmp_path, monkeypatch):
    typed = ["mode=eval", f"checkpoint='{whole}/whole'", "train.eval_batches=1", *QUIET, f"hydra.run.dir={tmp_path}/on"]
    evaluated = rank.evaluate_split

    def stopped(setup, strategy, split, say):
        if split == "test":
            raise Stopped("stopped in an evaluation")
        return evaluated(setup, strategy, split, say)

    with monkeypatch.context() as patch:
        patch.setattr(rank, "evaluate_split", stopped)
        assert main(typed) == stopping.EXIT_CODE
    assert main(typed) == 0
    assert len(records(tmp_path / "on")) == 2


def test_a_run_that_has_saved_nothing_prints_no_command_for_the_checkpoint_of_another(whole, tmp_path, capsys):
    typed = [f"train.resume='{whole}/killed'", "train.checkpoint_every=null", *QUIET]
    assert main([*typed, f"hydra.run.dir={tmp_path}/on"]) == 0
    said = capsys.readouterr().out
    assert f"files: {tmp_path}/on" in said and "evaluate:" not in said and "continue:" not in said


# -- longer than it was ----------------------------------------------------------------------------------------------

SHORT = ["model=toy", "train.epochs=null", "train.steps=4", *QUIET]


def test_the_command_that_a_run_prints_goes_on_at_the_rate_at_which_its_schedule_has_ended(tmp_path, capsys):
    assert main([*SHORT, "scheduler=cosine_warmup", f"hydra.run.dir={tmp_path}/a"]) == 0
    (printed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("continue:")]
    assert main([*shlex.split(printed)[3:], f"hydra.run.dir={tmp_path}/b"]) == 0
    rates = [step["lr"] for step in steps(tmp_path / "a") + steps(tmp_path / "b")]
    assert rates[4:] == pytest.approx(rates[3:4] * 4, rel=1e-5) and len(rates) == 8
    said = capsys.readouterr().err
    assert "scheduler._target_ training.optimizer.CosineWarmup -> " in said and "the learning rate jumps" not in said
    longer = [f"train.resume={tmp_path}/a", "train.steps=8", "logger=none", f"hydra.run.dir={tmp_path}/c"]
    assert main(longer) == 0
    said = capsys.readouterr().err
    assert "settings that differ from those before: schedule.total 4 -> 8; the scheduler follows" in said
    assert "so the learning rate jumps here" in said


def test_an_evaluation_that_is_not_finite_is_said(tmp_path, capsys):
    assert main([*SHORT, "train.steps=1", "optim.lr=1e38", f"hydra.run.dir={tmp_path}/a"]) == 0
    console = "".join(capsys.readouterr())
    assert "warning: val_loss is " in console and "warning: test_loss is " in console


def test_a_composed_configuration_of_a_run_is_run_again(tmp_path, capsys):
    assert main([*SHORT, "seed=5", "optim.lr=0.03", f"hydra.run.dir={tmp_path}/a"]) == 0
    again = [f"--config-dir={tmp_path}/a/.hydra", "--config-name=config"]
    assert main([*again, f"hydra.run.dir={tmp_path}/b"]) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert main([*again, f"hydra.run.dir={tmp_path}/b", "train.resume=auto", "train.steps=6"]) == 0
    assert [step["step"] for step in steps(tmp_path / "b")] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    for word in ("train.steps", "parallel.dp"):
        assert main([*again, f"{word}=many"]) == 1
        assert word in capsys.readouterr().err
    composed = tmp_path / "a" / ".hydra" / "config.yaml"
    older = OmegaConf.load(composed)
    del older.parallel.tp, older.parallel.sequence
    OmegaConf.save(older, composed)
    assert main([*again, f"hydra.run.dir={tmp_path}/c"]) == 0, "an earlier commit had fewer keys"
    assert losses(tmp_path / "a") == losses(tmp_path / "c")
