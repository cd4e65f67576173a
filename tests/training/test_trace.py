"""``train.trace``: the pipeline diagram and the Chrome trace of a run."""

import json

import pytest
from commandline import train as train_cli
from composed import config, for_rank, run, run_on_rank

from parallel.timeline import Interval
from training.reporting.timeline import draw, transfers, write_timeline
from training.setup import prepare

SHORT = ["train.epochs=null", "train.steps=3", "train.eval_every=null", "train.checkpoint_every=null"]


def gpipe(start=0.0, slow=1.0):
    """Two ranks, two micro-batches: forwards of 1 ms, backwards of 2 ms, each tensor sent in 0.1 ms."""
    first = [("forward", 0, 0, 0, 1), ("forward", 0, 1, 1, 2)]
    first += [("receive_gradient", 0, 0, 2, 5.2), ("backward", 0, 0, 5.2, 7.2)]
    first += [("receive_gradient", 0, 1, 7.2, 7.3), ("backward", 0, 1, 7.3, 9.3)]
    second = [("receive_activation", 1, 0, 0, 1.1), ("forward", 1, 0, 1.1, 2.1)]
    second += [("receive_activation", 1, 1, 2.1, 2.1), ("forward", 1, 1, 2.1, 3.1)]
    second += [("backward", 1, 0, 3.1, 5.1), ("backward", 1, 1, 5.1, 7.1)]
    return [
        [Interval(k, s, m, start + slow * a / 1e3, start + slow * b / 1e3) for k, s, m, a, b in r]
        for r in (first, second)
    ]


BUBBLE = 1 - 12 / (2 * 9.3)


@pytest.fixture(scope="module")
def plan():
    layout = ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.chunks=2"]
    return prepare(config(*layout, "train.global_batch_size=8")).plan


@pytest.fixture
def written(plan, tmp_path):
    """Steps 3 to 10 of two replicas; step 7 is of median duration."""
    slow = [9, 9, 1.1, 1.6, 1.3, 1.0, 1.5, 1.4]  # the first two are warm-up
    steps = [gpipe(100 + n, factor) for n, factor in enumerate(slow)]
    replica = [[step[position] for step in steps] for position in (0, 1)]
    write_timeline(tmp_path, plan, "toy", [*replica, *replica], last_step=10)
    return tmp_path


def test_the_picture_has_a_row_for_each_stage_and_a_number_on_each_block():
    figure = draw(dict(enumerate(gpipe())), "toy: gpipe", "step 7")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0\n(rank 0)", "stage 1\n(rank 1)"]
    assert sorted(text.get_text() for text in axes.texts) == ["0"] * 4 + ["1"] * 4
    assert "ms" in axes.get_xlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["forward", "backward", "idle (bubble)"]
    assert legend[3:] == ["receive: sender still computing", "receive: sent, until used"]


def test_a_rank_of_several_stages_is_one_row_and_its_stages_differ_in_shade():
    def rank(*stages):
        return [
            Interval(kind, s, 0, t / 100, (t + 1) / 100)
            for t, (kind, s) in enumerate(
                [(kind, s) for kind in ("forward", "backward_input", "backward_weight") for s in stages]
            )
        ]

    figure = draw({0: rank(0, 2), 1: rank(1, 3)}, "", "")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["stages 0, 2\n(rank 0)", "stages 1, 3\n(rank 1)"]
    *blocks, idle = [
        (text.get_text(), patch.get_facecolor())
        for text, patch in zip(figure.legends[0].get_texts(), figure.legends[0].get_patches(), strict=True)
    ]
    assert [name for name, _ in blocks] == [
        f"{kind} (stages {span})"
        for kind in ("forward", "backward, inputs", "backward, weights")
        for span in ("0-1", "2-3")
    ]
    assert len({colour for _, colour in blocks}) == 6


def test_a_transfer_begins_when_the_sender_is_done():
    found = {(t.kind, t.microbatch): t for t in transfers([i for rank in gpipe() for i in rank])}
    assert len(found) == 4
    waited = found["receive_activation", 0]
    assert (waited.posted, waited.ready, waited.used) == pytest.approx((0, 1e-3, 1.1e-3))
    gradient = found["receive_gradient", 0]
    assert (gradient.posted, gradient.ready, gradient.used) == pytest.approx((2e-3, 5.1e-3, 5.2e-3))
    late = found["receive_gradient", 1]  # the sender was done before the receive was posted
    assert late.ready == late.posted == pytest.approx(7.2e-3)


def test_the_chrome_trace_names_its_tracks_and_holds_five_steps_around_that_of_median_duration(written, plan):
    assert (written / "timeline.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((written / "timeline.json").read_text())
    assert content["otherData"]["bubble_fraction"] == pytest.approx(
        {"this_step": BUBBLE, "steady_steps": BUBBLE, "ideal": plan.ideal_bubble}
    )
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    tracks = ["rank {}: stage 0", "rank {}: receives", "rank {}: stage 1", "rank {}: receives"]
    assert list(names.values()) == [
        t.format(r) for ranks in ((0, 0, 1, 1), (2, 2, 3, 3)) for t, r in zip(tracks, ranks, strict=True)
    ]
    processes = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["replica 0", "replica 1"]
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in events} == {5, 6, 7, 8, 9}
    assert len(events) == 2 * 5 * 12
    assert {(e["pid"], e["tid"]) for e in events} == names.keys()


def test_events_of_the_chrome_trace_are_in_microseconds_and_never_overlap_on_a_track(written):
    content = json.loads((written / "timeline.json").read_text())
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in events) == 0
    (drawn,) = [
        e
        for e in events
        if e["args"] == {"step": 5, "microbatch": 1, "stage": 1} and e["name"] == "backward 1" and e["pid"] == 1
    ]
    assert (drawn["ts"], drawn["dur"]) == pytest.approx((1.1 * 5100, 1.1 * 2000), abs=0.01)
    for track in {(e["pid"], e["tid"]) for e in events}:
        times = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == track)
        assert all(ts + dur <= after + 0.01 for (ts, dur), (after, _) in zip(times, times[1:], strict=False))


def test_a_timeline_that_cannot_be_written_is_warned_about(plan, tmp_path, caplog):
    """As on a full disk: the run is over, and its results are still to be told."""
    (tmp_path / "file").write_text("")
    first, second = gpipe()
    with caplog.at_level("WARNING"):
        write_timeline(tmp_path / "file", plan, "toy", [[first], [second]] * 2, last_step=1)
    assert [name in caplog.text for name in ("timeline.png", "timeline.json")] == [True, True]


def test_a_run_without_a_pipeline_says_that_there_is_nothing_to_draw(tmp_path, capsys):
    run(tmp_path, *SHORT, "train.trace=true")
    assert "train.trace=true draws pipelines, parallel=single is none" in capsys.readouterr().err
    assert not list(tmp_path.glob("timeline.*"))


def test_a_pipelined_run_leaves_both_files(ranks, tmp_path):
    layout = ["parallel=pipelined", "parallel.chunks=4", "parallel.schedule=1f1b", "train.trace=true"]
    summary, _ = ranks.run(2, run_on_rank, *for_rank(tmp_path, *SHORT, *layout))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "timeline.json").read_text())
    found = content["otherData"]["bubble_fraction"]
    assert (found["steady_steps"], found["ideal"]) == (summary["bubble_fraction"], summary["ideal_bubble_fraction"])
    work = [e["args"] for e in content["traceEvents"] if e.get("cat") == "work"]
    assert sorted((e["step"], e["stage"], e["microbatch"]) for e in work) == sorted(
        2 * [(3, stage, microbatch) for stage in (0, 1) for microbatch in range(4)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule, chunks", [("gpipe", 4), ("1f1b", 8)])
def test_a_balanced_pipeline_idles_no_more_than_its_schedule_must(tmp_path, schedule, chunks):
    """Two stages of four equal blocks. Anything else that runs on the cores is in the measurement: three tries."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    recipe = ["model=gpt2", "model.n_layer=8", "model.n_head=4", "model.n_embd=256", "model.block_size=128"]
    recipe += ["model.vocab_size=256", "data=tokens", "data.format=nanogpt", "data.vocab_size=256", "data.seq_len=128"]
    recipe += [f"data.root={tmp_path}/train.bin", f"data.cache_dir={tmp_path}/cache"]
    recipe += ["train.steps=15", "train.global_batch_size=64", "train.eval_every=null", "train.checkpoint_every=null"]
    recipe += ["train.precision=fp32", "train.trace=true", "optim=sgd", "scheduler=constant", "logger=none"]
    recipe += ["parallel=pipelined", "parallel.threads=1", f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"]
    measured = []
    for attempt in range(3):
        done = train_cli(recipe, tmp_path / f"run{attempt}")
        assert done.code == 0, done.console
        assert (done.folder / "timeline.png").exists()
        ideal = done.summary["ideal_bubble_fraction"]
        assert ideal == pytest.approx(1 / (chunks + 1))
        measured.append(done.summary["bubble_fraction"])
        if abs(measured[-1] - ideal) <= 0.05:
            return
    pytest.fail(f"bubbles of {measured}, ideal {ideal}")
