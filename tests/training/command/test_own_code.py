"""Models, losses and optimizers in a folder of the user's own: ``--config-dir``."""

import json
import os
import sys
from contextlib import nullcontext

import pytest
from composed import config, records
from omegaconf import OmegaConf

from common.errors import TrainingError, UserError
from conf.instantiate import literal
from conf.received import check_received, compose_own
from training import train, verify
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
    assert [(one.tree["model"]["name"], one.tree["model"]["width"]) for one in queued] == [("deep", 4)] * 2
    assert all(str(tmp_path / "mine") in one.tree["import_from"] for one in queued)


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


DIARY = ["data=digits", "callbacks=[{_target_: mine.Diary, file: a}]", "parallel.env={OMP_PROC_BIND: close}"]
RUN_S_OWN = [
    "hydra.run.dir=runs/a", "callbacks=[{_target_: mine.Diary, file: '${hydra:runtime.output_dir}/diary-${run_id:}'}]",
]  # fmt: skip
IN_ITS_RUN = {"_target_": "mine.Diary", "file": f"{os.getcwd()}/runs/a/diary-abc123"}
ELSEWHERE = {**IN_ITS_RUN, "file": "/etc/diary-abc123"}


@pytest.mark.parametrize(
    ("typed", "changes", "named"),
    [
        ([], {}, None),
        (RUN_S_OWN, {"run_dir": "runs/a", "callbacks": [IN_ITS_RUN]}, None),
        (RUN_S_OWN, {"run_dir": "runs/a", "callbacks": [ELSEWHERE]}, "_target_=mine.Diary, callbacks"),
        (DIARY, {}, None),
        (["data=digits", "train.resume=runs/a"], {"train.resume": "auto"}, None),  # of the run directory
        ([], {"train.steps": 5, "parallel.balance": [1, 2]}, None),
        (DIARY, {"optim": {"_target_": "os.system", "lr": 1}}, "_target_=os.system"),
        (DIARY, {"optim": {"_target_": "torch.hub.load"}}, "_target_=torch.hub.load"),
        (DIARY, {"optim": {"_target_": "training.command.api.train"}}, "_target_=training.command.api.train"),
        (DIARY, {"callbacks": [{"_target_": "mine.Diary", "file": "b"}]}, "_target_=mine.Diary, callbacks"),
        (DIARY, {"parallel.env": {"LD_PRELOAD": "a.so"}}, "parallel.env"),
        ([], {"parallel.env": {"GIT_CONFIG_COUNT": "1"}}, "parallel.env"),
        (["data=digits"], {"data.cache_dir": "/etc"}, "data"),
        ([], {"model.init_from": "/etc/shadow"}, "model.init_from"),
        ([], {"train.resume": "/elsewhere"}, "train.resume"),
        ([], {"checkpoint": "/elsewhere"}, "checkpoint"),
        ([], {"run_dir": "/etc"}, "hydra.run.dir=/etc"),
        ([], {"run_dir": "outputs/../../etc/cron.d/b"}, "hydra.run.dir=outputs/../../etc/cron.d/b"),
        ([], {"run_dir": f"{os.getcwd()}/outputs/../10-00-00-a"}, "hydra.run.dir=.*/outputs/../10-00-00-a"),
        (["hydra.run.dir=runs/${now:%Y}/b"], {"run_dir": "runs/2026/b"}, None),
        (["hydra.run.dir=runs/${now:%Y}/b"], {"run_dir": "runs/2026/c"}, "hydra.run.dir=.*/runs/2026/c"),
        (["hydra.run.dir=runs/${now:%Y/%m/%d %H:%M}/b"], {"run_dir": "runs/2026/01/31 10:00/b"}, None),
        (["hydra.run.dir=runs/${now:%Y/%m}/b"], {"run_dir": f"{os.getcwd()}/runs/2026/../b"}, "hydra.run.dir=.*"),
    ],
)
def test_a_rank_takes_nothing_from_rank_0_that_is_executed_read_or_written_and_that_it_does_not_name(
    typed, changes, named, monkeypatch
):
    """Rank 0's configuration has come through a store that others may reach."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    own, own_dir = compose_own(typed)
    sent, run_dir = OmegaConf.create(literal(own)), changes.get("run_dir", "outputs/2026-01-01/10-00-00-abcdef")
    for key in changes.keys() - {"run_dir"}:
        OmegaConf.update(sent, key, changes[key], merge=False, force_add=True)
    received = OmegaConf.to_container(sent)
    path = run_dir if ".." in run_dir or named == "hydra.run.dir=/etc" else os.path.abspath(run_dir)
    with nullcontext() if named is None else pytest.raises(UserError, match=f"rank 0 sends {named}, which the command"):
        check_received(received, path, own, own_dir)


def test_a_key_that_is_taken_away_is_taken_away_on_every_rank():
    assert "noise" not in compose_own(["~data.noise"])[0]["data"]


def test_a_loss_that_the_last_layer_computes_cannot_be_replaced(text):
    cfg = config("model=gpt2", "model.size=tiny", *text)
    cfg.model.loss = {"_target_": "models.losses.TokenCrossEntropy"}
    with pytest.raises(TrainingError, match="head, computes the loss together with the logits"):
        prepare(cfg)


@pytest.mark.parametrize("result", [{"loss": 3.0, "token_loss": 0.0}, {"loss": 0.0}], ids=["token_loss", "loss"])
def test_perplexity_is_of_the_tokens_loss_and_not_of_the_total_with_other_terms(monkeypatch, text, result):
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: result)
    setup = prepare(config("model=gpt2", "model.size=tiny", *text))
    assert evaluate.evaluate_split(setup, None, "val", print)["val_perplexity"] == 1.0


@pytest.mark.parametrize("name", ["val_loss", "step_time_s", "val_nonsense"])
def test_an_objective_that_no_run_has_is_refused_before_the_run(name):
    cfg = config()
    OmegaConf.update(cfg, "sweep.objective", name)
    if name == "val_nonsense":
        with pytest.raises(TrainingError, match="sweep.objective=val_nonsense is not a number of this run"):
            prepare(cfg)
    else:
        prepare(cfg)
