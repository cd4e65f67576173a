"""Where runs and sweeps put their files: a directory each, and never another's."""

import re

import pytest
from commandline import Started, train


def test_two_runs_started_at_once_get_a_directory_each(tmp_path):
    overrides = ["train.epochs=null", "train.steps=1", "train.eval_every=null", "logger=none"]
    both = [Started(overrides, tmp_path / f"run{i}", cwd=tmp_path, own_folder=False) for i in (0, 1)]
    try:
        assert [one.wait().code for one in both] == [0, 0]
    finally:
        for one in both:
            one.kill()
    found = sorted((tmp_path / "outputs").glob("*/*"))
    assert len(found) == 2
    for folder in found:
        # The time to the second, and what tells two of the same second apart.
        assert re.fullmatch(r"\d\d-\d\d-\d\d-[0-9a-f]{6}", folder.name)
        assert (folder / "summary.json").exists()
    assert found[0].name[-6:] != found[1].name[-6:]


def contents(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("overrides", [["seed=1"], ["mode=plan"]], ids=str)
def test_a_directory_that_holds_another_run_is_refused_and_left_untouched(toy, overrides):
    before = contents(toy.folder)
    run = train([*overrides, "logger=none"], toy.folder, tag="second")
    assert run.code == 1
    assert f"{toy.folder} holds another run" in run.stderr
    assert "hydra.run.dir" in run.stderr and "train.resume=auto" in run.stderr
    assert "Traceback" not in run.console
    assert contents(toy.folder) == before


def test_a_sweep_directory_that_holds_another_sweep_is_refused_and_left_untouched(tmp_path):
    sweep = ["-m", "train.epochs=null", "train.steps=1", "train.eval_every=null", "logger=none"]
    sweep.append(f"hydra.sweep.dir={tmp_path}/sweep")
    first = train([*sweep, "seed=1,2"], tmp_path / "run", own_folder=False)
    assert first.code == 0, first.console
    folder = tmp_path / "sweep"
    assert all((folder / job / "summary.json").exists() for job in "01")
    before = {name: content for name, content in contents(folder).items() if name[0] in "01"}
    second = train([*sweep, "seed=3,4"], tmp_path / "run", own_folder=False)
    assert {name: content for name, content in contents(folder).items() if name[0] in "01"} == before
    assert second.code == 1
    assert "holds another run" in second.stderr


@pytest.mark.parametrize(
    "sweep, name",
    [(False, "metrics.jsonl"), (False, "logs/rank_0001.log"), (False, ".hydra"), (True, "0/checkpoints"), (True, "0")],
)
def test_a_link_that_leads_out_of_a_run_directory_is_refused_before_anything_is_written(tmp_path, capsys, name, sweep):
    from train import main

    folder, outside = tmp_path / "run", tmp_path / "outside"
    link = folder / name
    link.parent.mkdir(parents=True)
    outside.mkdir()
    link.symlink_to(outside / "not there" if "." in link.name else outside)
    where = [f"hydra.sweep.dir={folder}", "-m", "seed=1"] if sweep else [f"hydra.run.dir={folder}"]
    assert main(["logger=none", "train.resume=auto", *where]) == 1
    assert f"{link} is a link that leads out of" in capsys.readouterr().err
    assert list(outside.iterdir()) == []
    assert [path for path in folder.rglob("*") if path not in (link, *link.parents)] == []


def test_a_link_inside_a_run_directory_and_one_to_it_are_followed(tmp_path, capsys):
    from train import main

    (tmp_path / "disk" / "checkpoints").mkdir(parents=True)
    (tmp_path / "disk" / "checkpoints" / "latest").symlink_to("step-00000009")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert main(["mode=plan", "logger=none", f"hydra.run.dir={tmp_path}/run"]) == 0, capsys.readouterr().err
