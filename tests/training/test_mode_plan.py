"""mode=plan: what a run would look like, without running it."""

import re

import pytest
from commandline import train
from composed import config

from training.app import execute


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The default GPT-2, 124M, on two stages x two replicas."""
    folder = tmp_path_factory.mktemp("plan") / "run"
    run = train(
        ["parallel=pipe_ddp", "model=gpt2", "mode=plan", "device=cpu", "train.precision=fp32"], folder
    )
    assert run.code == 0, run.console
    return run


def table(said):
    """The memory table: one dict of MiB a rank."""
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    names = lines[start].split()[1:-1]
    rows = [line.replace(",", "").split() for line in lines[start + 1 :] if re.match(r" *\d", line)]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    return [dict(zip(names, map(int, row[1:]), strict=True)) for row in rows]


def test_the_plan_shows_the_layout_the_batch_cut_and_the_bubble(gpt2):
    said = gpt2.stdout
    assert "gpt2: 124,475,904 parameters   pipe_ddp: 4 processes on cpu, fp32" in said
    assert "the documentation of torch" in said
    assert re.search(r"unigram entropy [56]\.\d+ nats: the loss that counting its tokens reaches", said)
    assert re.search(r"global batch 16 x \d+ tokens = 2 replicas x 4 micro-batches of 2", said)
    assert "schedule gpipe, ideal bubble 20.0%" in said
    first, second = re.findall(r"stage (\d) on ranks ([\d,]+) +([\d,]+)  (.*)", said)
    assert (first[0], first[1], first[3]) == ("0", "0,2", "embedding … h.5 (7 layers)  50.2% of what the stages hold")
    assert (second[0], second[1], second[3]) == ("1", "1,3", "h.6 … head (7 layers)  49.8% of what the stages hold")
    shared = 50304 * 768  # the head and the embedding lie on both stages
    assert sum(int(stage[2].replace(",", "")) for stage in (first, second)) == 124_475_904 + shared


def test_the_plan_shows_the_memory_of_every_rank(gpt2):
    rows = table(gpt2.stdout)
    assert len(rows) == 4
    for row in rows:
        assert row["total"] == pytest.approx(sum(v for name, v in row.items() if name != "total"), abs=3)
        assert row["gradients"] == row["weights"]
        assert row["optimizer"] == pytest.approx(2 * row["weights"], abs=1)  # AdamW's two moments
    assert rows[0] == {**rows[2]} and rows[1] == {**rows[3]}, "replicas need the same"
    stage = (124_475_904 + 50304 * 768) / 2 * 4 / 2**20
    assert rows[0]["weights"] == pytest.approx(stage, rel=0.01)
    together = float(re.search(r"all ranks together: ([\d.]+) GiB", gpt2.stdout)[1])
    assert together == pytest.approx(sum(row["total"] for row in rows) / 1024, abs=0.1)


def test_the_plan_says_how_much_a_limited_evaluation_covers(tmp_path, capsys):
    execute(config("mode=plan", "train.eval_batches=3", "train.global_batch_size=100"), tmp_path, None)
    said = capsys.readouterr().out
    assert "evaluations: val 3 of 10 batches, test 3 of 10 batches, spread evenly" in said
    execute(config("mode=plan"), tmp_path, None)
    assert "evaluations" not in capsys.readouterr().out


def test_the_plan_trains_nothing(gpt2):
    assert {path.name for path in gpt2.folder.iterdir()} <= {".hydra", "train.log"}


def test_the_plan_of_one_process_has_no_bubble(tmp_path, capsys):
    execute(config("mode=plan"), tmp_path, None)
    said = capsys.readouterr().out
    assert "toy: 165 parameters   single: 1 process" in said
    assert "bubble" not in said
    assert len(table(said)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_estimate_is_within_a_factor_of_two_of_what_a_run_takes(tmp_path, text, capsys):
    model = [
        "model=gpt2",
        "model.size=tiny",
        "model.n_layer=4",
        "model.n_embd=256",
        *text,
        "data.seq_len=128",
    ]
    recipe = [*model, "parallel=pipelined", "device=cpu", "train.precision=fp32", "train.steps=2"]
    recipe += ["train.eval_every=null", "train.checkpoint_every=null", "train.global_batch_size=8"]
    execute(config(*recipe, "mode=plan"), tmp_path, None)
    rows = table(capsys.readouterr().out)
    run = train([*recipe, "logger=none"], tmp_path / "run")
    assert run.code == 0, run.console
    estimated = [row["total"] * 2**20 for row in rows]
    measured = run.summary["peak_memory_bytes"]
    assert len(estimated) == len(measured) == 2
    for guess, truth in zip(estimated, measured, strict=True):
        assert truth / 2 < guess < truth * 2, (estimated, measured)
    # The process alone is much of it here: what the model adds must be seen too.
    assert all(row["total"] > 1.2 * row["process"] for row in rows)
