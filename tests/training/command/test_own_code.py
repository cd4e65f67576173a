"""Models, losses and optimizers in a folder of the user's own: ``--config-dir``."""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from composed import config, records
from omegaconf import OmegaConf

from common.errors import TrainingError, UserError
from conf.composition import compose as composed_of
from conf.instantiate import literal, with_values
from training import train, verify
from training.command.ranks import check_agrees, resolved
from training.run import evaluate
from training.run.prepare import prepare

QUICK = ["train.epochs=null", "train.steps=3", "logger=none", "device=cpu", "parallel.threads=1"]
MODULE = '''
import torch
from torch import nn

from models.chain import Chain, LayerSpec
from models.losses import SquaredError, Sums


class Shift(nn.Module):
    """Holds a parameter and has no reset_parameters()."""

    def __init__(self, start: float):
        super().__init__()
        self.by = nn.Parameter(torch.full((5,), start))

    def forward(self, x):
        return x + self.by


class Absolute(SquaredError):
    metrics = ("worst",)

    def __call__(self, output, targets, weights):
        errors = (output - targets).abs()
        return Sums(errors.sum(), torch.tensor(errors.numel()), (errors.detach().amax(dim=1).sum(),))


class Sluggish(torch.optim.SGD):
    pass


def deep(width: int = 8, start: float = 1.0) -> Chain:
    layers = [
        LayerSpec("first", lambda: nn.Linear(10, width)),
        LayerSpec("last", lambda: nn.Linear(width, 5)),
        LayerSpec("shift", lambda: Shift(start)),
    ]
    return Chain(layers, loss=SquaredError())


def broken() -> Chain:
    layers = [LayerSpec("fine", lambda: nn.Linear(10, 5)), LayerSpec("attention", lambda: nn.LSTM(5, 5))]
    return Chain([*layers, LayerSpec("last", lambda: nn.Linear(5, 5))], loss=SquaredError())
'''


STRATEGY = """
from parallel.strategy import LocalStrategy

class Doubled(LocalStrategy):
    def train_step(self, *args, **kwargs):
        print("a step of mine", flush=True)
        return super().train_step(*args, **kwargs)
"""
OPTION = """
defaults: [/schema/parallel@_here_, _self_]
name: doubled
dp: null
strategy: {_target_: parallel.mine.Doubled, replicas: true}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """``mine/conf`` and, beside it, ``mine/my_models.py``."""
    folder = tmp_path / "mine"
    (folder / "conf" / "model").mkdir(parents=True)
    for name in ("conf/optim", "conf/parallel", "parallel"):
        (folder / name).mkdir()
    (folder / "parallel" / "mine.py").write_text(STRATEGY)
    (folder / "conf" / "parallel" / "doubled.yaml").write_text(OPTION)
    (folder / "my_models.py").write_text(MODULE)
    for name, keys in {"deep": "width: 8\nstart: 1.0\n", "broken": ""}.items():
        (folder / "conf" / "model" / f"{name}.yaml").write_text(f"_target_: my_models.{name}\n{keys}")
    sluggish = "_target_: my_models.Sluggish\nlr: 0.1\nupdate: elementwise\n"
    (folder / "conf" / "optim" / "sluggish.yaml").write_text(sluggish)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_models", "parallel.mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return [f"--config-dir={folder}/conf"]


def test_a_model_and_an_optimizer_of_a_folder_beside_the_configuration_are_trained_on_workers(mine, tmp_path, capfd):
    words = [*mine, "model=deep", "model.width=4", "optim=sluggish", "parallel=pipelined"]
    loss = "model.loss={_target_: my_models.Absolute}"
    result = train(*words, loss, *QUICK, "parallel.chunks=2", f"hydra.run.dir={tmp_path}/run")
    assert [name for stage in result.summary["stages"] for name in stage["layers"]] == ["first", "last", "shift"]
    said = capfd.readouterr().out
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    assert len(steps) == 3 and all(record["worst"] > 0 for record in steps)
    (printed,) = [line for line in said.splitlines() if line.startswith("evaluate: training.train(")]
    forget(tmp_path)
    again = train(*json.loads(f"[{printed[len('evaluate: training.train(') : -1]}]"), f"hydra.run.dir={tmp_path}/again")
    assert again.summary["test_loss"] == pytest.approx(result.summary["test_loss"], rel=1e-6)


def forget(folder):
    """As in a new process: what is in ``folder`` is imported no longer."""
    sys.path[:] = [path for path in sys.path if not path.startswith(str(folder))]
    sys.modules.pop("my_models", None)


def test_a_strategy_of_the_folder_trains_on_workers_as_single_does(mine, tmp_path, capfd):
    words = [*mine, "model=deep", *QUICK]
    own = train(*words, "parallel=doubled", "parallel.dp=2", f"hydra.run.dir={tmp_path}/own")
    assert capfd.readouterr().out.count("a step of mine") == 3
    alone = train(*words, f"hydra.run.dir={tmp_path}/alone")
    assert own.summary["final_loss"] == pytest.approx(alone.summary["final_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_strategy_of_the_folder_is_verified(mine, tmp_path):
    report = verify(*mine, "model=deep", "parallel=doubled", "verify.steps=2", f"hydra.run.dir={tmp_path}/run")
    assert report.ok and [layout.name for layout in report.compared] == ["parallel=doubled dp=2"]


NO_STRATEGIES = [
    (["parallel=ddp", "parallel.strategy={_target_: parallel.mine.Doubled}"], "another parallel.name than ddp"),
    (["parallel=doubled", "+parallel.strategy.nope=3"], "there is no key parallel.strategy.nope"),
    (["parallel=doubled", "parallel.strategy._target_=torch.nn.Linear"], "torch.nn.Linear is not a strategy"),
]


@pytest.mark.parametrize(("words", "said"), NO_STRATEGIES)
def test_a_strategy_of_the_folder_that_is_none_is_named(words, said, mine, tmp_path):
    with pytest.raises(UserError, match=said):
        train(*mine, *words, "model=deep", *QUICK, f"hydra.run.dir={tmp_path}/run")


def test_options_may_stand_anywhere_on_the_command_line(mine, tmp_path, capsys):
    (folder,) = [word.partition("=")[2] for word in mine]
    words = ["model=deep", "--config-dir", folder, *QUICK, "mode=plan"]
    train(*words, f"hydra.run.dir={tmp_path}/run")
    assert "deep: " in capsys.readouterr().out, "the plan"


def test_a_job_of_an_array_finds_them_too(mine, tmp_path, monkeypatch):
    from train import main

    queued = []
    monkeypatch.setattr("training.command.sweep_jobs._run_all", queued.extend)
    # A width is nothing that the model has which Hydra composes with first, without what is swept.
    words = ["-m", *mine, "model=deep,deep", "model.width=4", "launcher=slurm", "launcher.gpus_per_node=0", *QUICK]
    main([*words, f"hydra.sweep.dir={tmp_path}/sweep"])
    assert [(one.cfg.model.name, one.cfg.model.width) for one in queued] == [("deep", 4)] * 2
    assert all(str(tmp_path / "mine") in one.cfg.import_from for one in queued)


def test_a_class_of_the_folder_in_which_the_command_is_typed_is_named_by_its_target(mine, tmp_path, monkeypatch):
    """What older commands typed, ``allow=``, changes nothing."""
    monkeypatch.chdir(tmp_path / "mine")
    loss = "model.loss={_target_: my_models.Absolute}"
    result = train("model=toy", "allow=[my_models]", loss, *QUICK, f"hydra.run.dir={tmp_path}/run")
    assert result.summary["steps"] == 3


def test_what_a_checkpoint_names_of_other_packages_is_built_only_where_the_command_names_it(mine, tmp_path):
    train(*mine, "model=deep", *QUICK, f"hydra.run.dir={tmp_path}/run")
    forget(tmp_path)
    words = ["mode=eval", f"checkpoint={tmp_path}/run", "logger=none", f"hydra.run.dir={tmp_path}/again"]
    with pytest.raises(TrainingError, match="names model._target_=my_models.deep, which is not allowed.*type model._t"):
        train(*words)
    assert train(*mine, *words).summary["model"] == "deep"


def test_a_layer_whose_output_cannot_be_passed_on_is_named_before_anything_starts(mine, tmp_path):
    with pytest.raises(TrainingError, match=r"layer 'attention' \(LSTM\) returned a tuple in a tuple"):
        train(*mine, "model=broken", *QUICK, f"hydra.run.dir={tmp_path}/run")


START = (0.0, "abc123", time.mktime((2026, 1, 31, 10, 0, 0, 0, 0, -1)))
DIARY = ["data=digits", "callbacks=[{_target_: mine.Diary, file: a}]", "parallel.env={OMP_PROC_BIND: close}"]
RUN_S_OWN = [
    "hydra.run.dir='runs/${now:%Y/%m/%d %H:%M}'",
    "callbacks=[{_target_: mine.Diary, file: '${hydra:runtime.output_dir}/diary-${run_id:}'}]",
]


@pytest.mark.parametrize(
    ("typed", "changes", "named"),
    [
        ([], {}, None),
        (RUN_S_OWN, {}, None),
        (DIARY, {}, None),
        (["~data.noise"], {}, None),
        ([], {"logger.name": "other"}, None),
        ([], {"train.steps": 5, "seed": 8}, "seed, train.steps"),
        ([], {"train.resume": "/elsewhere"}, "train.resume"),
        (RUN_S_OWN, {"callbacks": [{"_target_": "mine.Diary", "file": "/etc/diary-abc123"}]}, "callbacks"),
        (DIARY, {"optim": {"_target_": "os.system", "lr": 1}}, "optim._target_, .*, optim.lr, .*"),
        ([], {"parallel.env": {"GIT_CONFIG_COUNT": "1"}}, "parallel.env.GIT_CONFIG_COUNT"),
        ([], {"parallel.strategy": {"_target_": "os.system"}}, "parallel.strategy._target_"),
    ],
)
def test_a_rank_runs_its_own_command_line_and_names_what_differs_on_rank_0(typed, changes, named):
    tree, folder = resolved(composed_of(typed, with_hydra=True), START)
    sent = OmegaConf.create(literal(tree))
    for key, value in changes.items():
        OmegaConf.update(sent, key, value, merge=False, force_add=True)
    with nullcontext() if named is None else pytest.raises(UserError, match=f"rank 0 sends {named}, which the command"):
        check_agrees(tree, OmegaConf.to_container(sent))
    if typed == RUN_S_OWN:
        assert folder == Path("runs/2026/01/31 10:00").absolute()
        assert tree["callbacks"][0]["file"] == f"{folder}/diary-abc123"


@pytest.mark.parametrize("start", [["x", "abc123", 0.0], [0.0, "../../etc", 0.0], [0.0, "/etc", 0.0]])
def test_a_rank_takes_no_path_from_rank_0_as_the_time_or_the_name_of_a_run(start):
    with pytest.raises(ValueError, match="invalid literal|could not convert"):
        resolved(composed_of([], with_hydra=True), start)


def test_a_loss_that_the_last_layer_computes_cannot_be_replaced(text):
    loss = {"_target_": "models.losses.ClassCrossEntropy"}
    cfg = with_values(config("model=gpt2", "model.size=tiny", *text), {"model.loss": loss})
    with pytest.raises(TrainingError, match="head, computes the loss together with the logits"):
        prepare(cfg)


@pytest.mark.parametrize("result", [{"loss": 3.0, "token_loss": 0.0}, {"loss": 0.0}], ids=["token_loss", "loss"])
def test_perplexity_is_of_the_tokens_loss_and_not_of_the_total_with_other_terms(monkeypatch, text, result):
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: result)
    setup = prepare(config("model=gpt2", "model.size=tiny", *text))
    assert evaluate.evaluate_split(setup, None, "val", print)["val_perplexity"] == 1.0


@pytest.mark.parametrize("name", ["val_loss", "step_time_s", "val_nonsense"])
def test_an_objective_that_no_run_has_is_refused_before_the_run(name):
    cfg = with_values(config(), {"sweep.objective": name})
    if name == "val_nonsense":
        with pytest.raises(TrainingError, match="sweep.objective=val_nonsense is not a number of this run"):
            prepare(cfg)
    else:
        prepare(cfg)
