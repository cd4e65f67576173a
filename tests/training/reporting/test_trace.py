"""``train.trace``: the pipeline diagram and the Chrome trace of a run."""

import json

from composed import for_rank, run_on_rank

from parallel.timeline import Interval
from training.reporting.timeline import draw

SHORT = ["train.epochs=null", "train.steps=3", "train.eval_every=null", "train.checkpoint_every=null"]


def gpipe():
    """Two ranks, two micro-batches: forwards of 1 ms, backwards of 2 ms, each tensor sent in 0.1 ms."""
    first = [("forward", 0, 0, 0, 1), ("forward", 0, 1, 1, 2)]
    first += [("receive_gradient", 0, 0, 2, 5.2), ("backward", 0, 0, 5.2, 7.2)]
    first += [("receive_gradient", 0, 1, 7.2, 7.3), ("backward", 0, 1, 7.3, 9.3)]
    second = [("receive_activation", 1, 0, 0, 1.1), ("forward", 1, 0, 1.1, 2.1)]
    second += [("receive_activation", 1, 1, 2.1, 2.1), ("forward", 1, 1, 2.1, 3.1)]
    second += [("backward", 1, 0, 3.1, 5.1), ("backward", 1, 1, 5.1, 7.1)]
    return [[Interval(k, s, m, a / 1e3, b / 1e3) for k, s, m, a, b in r] for r in (first, second)]


def test_the_picture_has_a_row_for_each_stage_and_a_number_on_each_block():
    figure = draw(dict(enumerate(gpipe())), "toy: gpipe", "step 7")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0\n(rank 0)", "stage 1\n(rank 1)"]
    assert sorted(text.get_text() for text in axes.texts) == ["0"] * 4 + ["1"] * 4
    assert "ms" in axes.get_xlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["forward", "backward", "idle (bubble)"]
    assert legend[3:] == ["receive: sender still computing", "receive: sent, until used"]


def test_the_blocks_of_a_stage_that_is_far_faster_have_numbers_above_them():
    first, second = gpipe()
    first = [i._replace(end=i.start + (i.end - i.start) / 100) if "receive" not in i.kind else i for i in first]
    (axes,) = draw({0: first, 1: second}, "toy: gpipe", "step 7").axes
    numbers = [[text.get_text() for text in axes.texts if round(text.get_position()[1]) == row] for row in (0, 1)]
    assert numbers == [["0", "1", "0", "1"]] * 2


def test_a_pipelined_run_leaves_both_files(ranks, tmp_path):
    layout = ["parallel=pipelined", "parallel.chunks=4", "parallel.schedule=1f1b", "train.trace=true"]
    summary, _ = ranks.run(2, run_on_rank, *for_rank(tmp_path, *SHORT, *layout))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "timeline.json").read_text())
    found = content["otherData"]["bubble_fraction"]
    assert (found["steady_steps"], found["ideal"]) == (summary["bubble_fraction"], summary["ideal_bubble_fraction"])
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["rank 0: stage 0", "rank 0: receives", "rank 1: stage 1", "rank 1: receives"]
    work = [e["args"] for e in content["traceEvents"] if e.get("cat") == "work"]
    assert sorted((e["step"], e["stage"], e["microbatch"]) for e in work) == sorted(
        2 * [(3, stage, microbatch) for stage in (0, 1) for microbatch in range(4)]
    )
