"""What is left to the machine: parallel=auto, parallel.chunks=auto, parallel.balance=time and mode=compare."""

import json
import re
from dataclasses import replace

import pytest
import torch
from commandline import train
from composed import compose, plain

from common.errors import PlanError
from conf import COMMAND
from conf.composition import Composed
from conf.instantiate import with_values
from launchers import World
from planner import here
from training.checkpoint.files import Checkpoint
from training.command.launch import prepared
from training.studies.planning import choice
from training.studies.planning.choice import choose, predict_here
from training.studies.planning.comparison import Row, to_try
from training.studies.planning.paper import command, predict_on_paper
from training.studies.planning.recall import recall
from training.studies.planning.trial import Trial

COMMON = ["model=toy", "logger=none", "train.steps=4", "train.global_batch_size=4", "data.samples=40"]
LONGER = ["train.steps=6" if word == "train.steps=4" else word for word in COMMON]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    overrides = ["parallel=pipelined", "parallel.chunks=auto", "parallel.balance=time"]
    return train([*COMMON, *overrides], tmp_path_factory.mktemp("choices") / "run")


@pytest.mark.slow
def test_chunks_auto_prints_the_table_and_records_what_it_chose_from_it(chosen):
    assert chosen.code == 0, chosen.console
    choice = json.loads((chosen.folder / "choices.json").read_text())
    assert choice["chunks"] == chosen.summary["chunks"] and choice["seconds"] > 0
    table = re.findall(r"^\d+ +pipelined pp=2 gpipe chunks=(\d)( recompute)? +([\d.e-]+)", chosen.stdout, re.MULTILINE)
    assert {int(chunks) for chunks, *_ in table} == {1, 2, 4}
    assert float(table[0][2]) == min(float(seconds) for *_, seconds in table)
    fastest = min(choice["tried"], key=choice["tried"].get, default=f"chunks={table[0][0]}")
    assert f"chunks={choice['chunks']}" in fastest
    assert re.search(rf"parallel.chunks={choice['chunks']}\b.* is (predicted to be )?the fastest", chosen.stdout)


@pytest.mark.slow
def test_the_run_itself_is_as_if_the_numbers_had_been_given(chosen, tmp_path):
    stages = [len(stage["layers"]) for stage in chosen.summary["stages"]]
    numbers = [f"parallel.chunks={chosen.summary['chunks']}", f"parallel.balance={stages}".replace(" ", "")]
    given = train([*COMMON, "parallel=pipelined", *numbers], tmp_path / "given")
    assert given.losses == chosen.losses
    assert "of the time" in chosen.stdout and "of the time" not in given.stdout


@pytest.mark.slow
def test_a_resumed_run_takes_the_numbers_of_its_checkpoint(chosen):
    again = ["parallel=pipelined", "parallel.chunks=auto", "parallel.balance=time", "train.resume=auto"]
    run = train([*LONGER, *again], chosen.folder, tag="again")
    assert run.code == 0, run.console
    assert "is measured" not in run.stdout and "of the time" not in run.stdout
    assert run.summary["chunks"] == json.loads((chosen.folder / "choices.json").read_text())["chunks"]
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def automatic(tmp_path_factory):
    words = ["parallel=auto", "parallel.pp=2", "parallel.chunks=2"]
    return train([*COMMON, *words], tmp_path_factory.mktemp("automatic") / "run", before=hurry)


def hurry():
    """In a new process, and those that it forks: what is measured need not be exact, and of strategies nothing is."""
    here._ROUNDS, here._SIZES, here._LEAST_S = 1, 2, 0.001
    here._step = lambda ranks, subject, name, numbers, chunks=1, **more: torch.tensor([1e-3 * chunks, 1e-4])
    choice._SECONDS = 0.1


def test_parallel_auto_keeps_what_is_typed_trains_and_shows_predicted_beside_measured(automatic):
    assert automatic.code == 0, automatic.console
    choice = json.loads((automatic.folder / "choices.json").read_text())
    assert (choice["pp"], choice["chunks"]) == (automatic.summary["pp"], automatic.summary["chunks"]) == (2, 2)
    assert choice["name"] == automatic.summary["parallel"] == "pipelined"
    assert choice["schedule"] == automatic.summary["schedule"]
    assert re.search(r"predicted [\d.]+ s a step and [\d.]+ GiB .*, measured [\d.]+ s \(.*%\)", automatic.stdout)
    assert "python train.py model=toy" in automatic.stdout and "to copy" in automatic.stdout


def test_the_same_words_go_on_with_the_layout_that_was_chosen_and_evaluate(automatic):
    run = train([*LONGER, "parallel=auto", "train.resume=auto"], automatic.folder, tag="again")
    assert run.code == 0, run.console
    assert "is measured" not in run.stdout and [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6]
    same = ("parallel", "pp", "chunks", "schedule")
    assert {key: run.summary[key] for key in same} == {key: automatic.summary[key] for key in same}
    told = re.search(r"evaluate: python train.py (.*)", automatic.stdout)[1].split()
    assert "parallel=auto" in told
    evaluated = train(told, automatic.folder.parent / "evaluated")
    assert evaluated.code == 0, evaluated.console
    assert evaluated.summary["parallel"] == "pipelined"


def test_a_resumed_layout_computes_again_what_it_has_computed_again(automatic, monkeypatch):
    saved = Checkpoint.find(automatic.folder)
    saved.config["train"]["activation_checkpointing"] = True
    monkeypatch.setattr(Checkpoint, "find", lambda path: saved)
    cfg = cfg_of("parallel=auto", f"train.resume='{automatic.folder}'")
    cfg = recall(cfg, automatic.folder)
    assert cfg.train.activation_checkpointing and (cfg.parallel.name, cfg.parallel.pp) == ("pipelined", 2)


def test_cores_beyond_the_most_processes_are_left_alone(monkeypatch):
    monkeypatch.setattr(choice, "usable_cores", lambda: 16)
    assert choice._counts({}, "cpu") == [1, 2, 8]


@pytest.mark.slow
def test_mode_plan_prints_what_would_be_chosen_and_leaves_nothing(tmp_path):
    run = train([*COMMON, "parallel=auto", "mode=plan"], tmp_path / "run")
    assert run.code == 0, run.console
    assert "is predicted to be the fastest" in run.stdout and "GiB" in run.stdout
    assert not (tmp_path / "run" / "choices.json").exists()


def cfg_of(*words):
    return plain(compose(*COMMON, *words))


@pytest.mark.parametrize("word", ["parallel=auto", "parallel.chunks=auto"])
def test_where_processes_exist_already_nothing_is_chosen(tmp_path, word):
    with pytest.raises(PlanError, match=f"{word} chooses before processes start"):
        choose(cfg_of(word), tmp_path, World(0, 2, 0, 2, "torchrun"))


def made_up(subject, processes, *sizes):
    """What would be measured, where it does not matter."""
    layers = tuple(here.LayerSeconds(name, *[here.Line(1e-3)] * 4) for name in subject.chain.names)
    messages = dict.fromkeys(("gpipe", "1f1b", "interleaved_1f1b"), here.Line(1e-3))
    return here.Here(processes, processes, layers, step=0.1, update=here.Line(1e-3), messages=messages)


def test_where_nothing_fits_the_nearest_is_named(monkeypatch):
    monkeypatch.setattr(choice, "available_memory", lambda: 2**20)
    monkeypatch.setattr(choice, "measure", made_up)
    with pytest.raises(PlanError, match=r"none of \d+ layouts fits into 0.0 GiB; what comes nearest, parallel="):
        predict_here(cfg_of("parallel=auto"))


def test_a_job_of_a_cluster_gets_the_best_layout_of_its_nodes(tmp_path):
    words = ("launcher=slurm", "launcher.nodes=2", "launcher.tasks_per_node=2", "cluster=laptop", "parallel=auto")
    cfg = cfg_of(*words)
    plan = prepared(Composed(cfg, tmp_path)).plan
    choice = json.loads((tmp_path / "choices.json").read_text())
    assert plan.processes == 4 and choice["name"] == plan.strategy and choice["dp"] * choice["pp"] == 4


class Normalised(torch.optim.SGD):
    """An optimizer that says nothing of what its update depends on."""


def test_a_layout_that_the_optimizer_does_not_allow_is_not_chosen():
    """One that may compute one number from all parameters needs a rank that has them all."""
    words, whole = ("parallel=auto", "cluster=laptop", "mode=plan"), f"optim._target_={__name__}.Normalised"
    free, _ = predict_on_paper(cfg_of(*words))
    kept, _ = predict_on_paper(cfg_of(*words, whole))
    assert {"pipelined", "fsdp"} & {one.layout.strategy for one in free.best}
    assert {one.layout.strategy for one in kept.best} == {"single", "ddp"}
    command_ = {COMMAND: {"typed": ["parallel.dp", "parallel.pp"]}}
    typed = with_values(cfg_of(*words, "parallel.dp=1", "parallel.pp=2", whole), command_)
    with pytest.raises(PlanError, match="Normalised may compute one number .* and parallel=pipelined gives no rank"):
        predict_on_paper(typed)


@pytest.mark.slow
def test_compare_runs_each_strategy_s_best_beside_its_prediction(tmp_path):
    run = train([*COMMON, "mode=compare"], tmp_path / "run")
    assert run.code == 0, run.console
    found = json.loads((tmp_path / "run" / "comparison.json").read_text())
    names = [row["layout"]["name"] for row in found["rows"]]
    assert {"single", "ddp", "fsdp", "pipelined"} <= {*names} and not found["problems"]
    assert f"{len(names)} of {len(names)}  " in run.stdout
    seconds = [row["measured"]["seconds"] for row in found["rows"]]
    assert seconds == sorted(seconds) and all(row["predicted"]["seconds"] > 0 for row in found["rows"])
    for row in found["rows"]:
        for kind in ("predicted", "measured"):
            parts = [row[kind][part] for part in ("compute", "bubble", "communication")]
            assert sum(parts) == pytest.approx(row[kind]["seconds"]) and min(parts) > -1e-9
    assert f"{names[0]}" in run.stdout and "is the fastest here" in run.stdout
    page = (tmp_path / "run" / "comparison.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2 and "is the fastest here" in page
    assert all((tmp_path / "run" / name).stat().st_size > 5000 for name in ("comparison.png", "timelines.png"))


def test_what_trains_without_a_word_is_compared_beside_a_faster_layout_of_one_process(monkeypatch):
    monkeypatch.setattr(choice, "measure", made_up)
    found, _ = predict_here(cfg_of("parallel=auto"), counts=(1, 2))
    by_chunks = {one.layout.chunks: one for one in reversed(found.best) if one.layout.strategy == "single"}
    for first in (1, 2):
        tried = to_try(replace(found, best=[by_chunks[first], *found.best]))
        assert {one.layout.chunks for one in tried if one.layout.strategy == "single"} == {1, first}
        assert len(tried) == len({one.name for one in tried})


def test_no_part_of_a_measured_step_is_below_0(monkeypatch):
    monkeypatch.setattr(choice, "measure", made_up)
    found, _ = predict_here(cfg_of("parallel=auto"), counts=(1,))
    assert Row(found.best[0], Trial(0.3, 1, busy=0.1, idle=0.2)).measured["communication"] == 0


def test_a_layout_becomes_the_keys_of_its_command(monkeypatch):
    monkeypatch.setattr(choice, "measure", made_up)
    found, _ = predict_here(cfg_of("parallel=auto"), counts=(2,))
    typed = ["model=toy", "parallel=auto", "parallel.pp=2", "parallel.threads=1", "mode=plan"]
    assert command(typed, found.best[0]).startswith("python train.py model=toy parallel.threads=1 parallel=")
    for one in found.best:
        typed = cfg_of(*one.layout.words())
        assert {**typed.parallel, **typed.train}.items() >= one.layout.keys().items()
