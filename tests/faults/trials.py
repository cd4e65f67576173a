"""What each kind of fault does to a run, and what is wrong with how the run ended."""

import json
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import psutil
from faults.plan import EVALUATION, MOMENT, SAVE, STEP, WRITERS, Fault, Trial
from faults.runs import RANKS, SAVE_EVERY, Ended, Started, corrupt, differences, launch

from parallel.strategies import strategy_info

# -- kill -9 of each rank at each point: the group starts again and goes on from the newest checkpoint by itself ------

_BEFORE_AND_AFTER = {"optimizer step", "write_file", "publish", "update_link"}
_WRITERS = {"ddp": 1, "pipelined": 2, "pipe_ddp": 2, "fsdp": 2}  # so many ranks, the first, write checkpoints


def every_kill(strategy: str) -> list[Fault]:
    """Each rank at each point of a step and of a save; ``spaced`` gives them their steps."""
    faults = []
    for rank in range(RANKS[strategy]):
        for point in (*STEP, *SAVE):
            takes_part = point in STEP or rank == 0 or (point in WRITERS and rank < _WRITERS[strategy])
            ats = ("before", "after") if point in _BEFORE_AND_AFTER else ("before",)
            # A rank that has no part in a phase dies while rank 0 is in it.
            faults += [Fault("kill", rank, point, 0, at, None if takes_part else 0) for at in ats]
    return faults


def spaced(faults: list[Fault]) -> list[Fault]:
    """``faults`` for one run: each a checkpoint later than the one before, so that none is met again on the way."""
    # The first saves have nothing to fall back on, and nothing old to remove.
    steps = [SAVE_EVERY * (number + 5) for number in range(len(faults))]
    return [replace(f, step=step + (f.point in STEP)) for f, step in zip(faults, steps, strict=True)]


def kill(strategy: str, faults: list[Fault], folder: Path) -> list[Trial]:
    """One run that meets all of ``faults``, against one that meets none."""
    steps = max(fault.step for fault in faults) + SAVE_EVERY + 2
    undisturbed = launch(strategy, steps, folder / "undisturbed")
    restarts = f"launcher.max_restarts={len(faults)}"
    disturbed = launch(strategy, steps, folder / "disturbed", faults, restarts, timeout_s=60.0 + 40.0 * len(faults))
    wrong, finished, trials = differences(disturbed, undisturbed), disturbed.run.code == 0, []
    for words in (f"rank {faults[0].rank} was killed by signal 9", f"restart 1 of {len(faults)} (launcher.max_rest"):
        wrong += [] if words in disturbed.run.stderr else [f"'{words}' was not said"]
    for number, fault in enumerate(faults):
        name, struck = f"kill -9: {fault.point}", disturbed.struck(number)
        again = disturbed.record.read(f"begun-{number + 1}-{fault.rank}")
        if struck is None:
            trials.append(Trial(name, strategy, False, problem=f"{fault} never struck; {'; '.join(wrong)}"))
            continue
        lost = max(0, struck["done"] + 1 - again["first_step"]) if again else None
        trials.append(Trial(name, strategy, finished, lost, not wrong, "; ".join(wrong)))
    return trials


# -- SIGTERM at any moment: saved within ten seconds, exit code 75, and the resumed run is as if nothing had been ------

_WITHIN_S = 10.0
_PER_SIGNAL = 40  # steps: some pass, of a few milliseconds each, until a signal has reached all ranks


def moments(strategy: str, count: int, seed: int) -> list[Fault]:
    """Random ones, one in four in an evaluation, in the order in which a run meets them."""
    draw = random.Random(seed)
    points = [point for point in STEP if point != "all-reduce" or RANKS[strategy] > 1]
    faults = []
    for number in range(count):
        step = _PER_SIGNAL * (number + 1)
        point = EVALUATION if number % 4 == 3 else draw.choice([MOMENT, MOMENT, *points, *SAVE[:2]])
        if point not in (EVALUATION, *SAVE):
            step += draw.choice([1, 2, 3])
        delay = draw.uniform(0.0, 0.03) if point in (MOMENT, EVALUATION) else 0.0
        faults.append(Fault("term", 0, point, step, delay_s=delay))
    return faults


def interrupt(strategy: str, faults: list[Fault], folder: Path, *more: str) -> list[Trial]:
    """A run that is told to stop, resumed, told to stop, … to its end, against one that is left alone.

    ``more``: further words of the command line.
    """
    steps = faults[-1].step + _PER_SIGNAL  # the last one is to arrive before the end, too
    undisturbed = launch(strategy, steps, folder / "undisturbed", [], *more)
    more = ("train.resume=auto", *more)
    stopped = [launch(strategy, steps, folder / "disturbed", [fault], *more) for fault in faults]
    last = launch(strategy, steps, folder / "disturbed", [], *more)
    different, trials = differences(last, undisturbed), []
    for fault, ended in zip(faults, stopped, strict=True):
        name = "SIGTERM in an evaluation" if fault.point == EVALUATION else "SIGTERM at a random moment"
        wrong = ended.wrong(within_s=_WITHIN_S, code=75)
        latest, lost = ended.run.folder / "checkpoints" / "latest", None
        if latest.exists() and ended.run.steps:  # steps on record that the newest checkpoint does not hold
            lost = ended.run.steps[-1]["step"] - int(latest.resolve().name.partition("-")[2])
        problem = "; ".join([*wrong, *different])
        trials.append(Trial(name, strategy, not wrong, lost, not different, problem))
    return trials


# -- a file of the newest checkpoint damaged: that is said, and the checkpoint before is gone on from ------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit-flipped": _flip,
    "deleted": Path.unlink,
}
FILES = ("model-00.safetensors", "optimizer-00.safetensors", "manifest.json")


def damage(strategy: str, folder: Path, damages=tuple(DAMAGES), files=FILES) -> list[Trial]:
    """Each kind of damage to each kind of file."""
    steps, stopped_after = 8, 5
    undisturbed = launch(strategy, steps, folder / "undisturbed")
    half = launch(strategy, steps, folder / "half", [Fault("term", 0, "forward", stopped_after)])
    trials = []
    for kind, name in [(kind, name) for kind in damages for name in files]:
        hurt = folder / f"{kind}-{name}"
        shutil.copytree(half.run.folder, hurt / "run", symlinks=True)
        newest = (hurt / "run" / "checkpoints" / "latest").resolve()
        DAMAGES[kind](newest / name)
        ended = launch(strategy, steps, hurt, [], "train.resume=auto")
        wrong = differences(ended, undisturbed)
        if newest.name not in ended.run.console or "damaged" not in ended.run.console:
            wrong.append(f"nothing was said of {newest.name}")
        begun = ended.record.read("begun-0-0")
        lost = stopped_after + 1 - begun["first_step"] if begun else None
        survived = ended.run.code == 0 and lost == 1
        trials.append(Trial(f"checkpoint file {kind}", strategy, survived, lost, not wrong, "; ".join(wrong)))
    return trials


# -- one rank whose gradient is not a number, and one that no longer moves ---------------------------------------------

# Ranks wait so long for each other, then those that gave up tell the launching process, which ends them all.
_TIMEOUT_S, _ENDING_S = 10.0, 30.0


def poison(strategy: str, rank: int, folder: Path) -> Trial:
    """NaN in the gradient of one rank: all skip that step together and the replicas, where there are, stay equal."""
    ended = launch(strategy, 3 * SAVE_EVERY, folder, [Fault("nan", rank, "nan", SAVE_EVERY + 1)])
    wrong = ended.wrong(code=0)
    skipped = [line["step"] for line in ended.run.steps if line["skipped"]]
    if skipped != [SAVE_EVERY + 1]:
        wrong.append(f"steps {skipped} were skipped")
    equal = None if strategy_info(strategy).sharded else _replicas_equal(ended, strategy)  # shares differ
    return Trial("NaN on one rank", strategy, not wrong, 1, equal, "; ".join(wrong))


def stall(strategy: str, rank: int, folder: Path) -> Trial:
    """SIGSTOP: the rank is named, all of the run is ended."""
    fault = Fault("stop", rank, "forward", SAVE_EVERY + 2)
    ended = launch(strategy, 3 * SAVE_EVERY, folder, [fault], f"parallel.timeout_s={_TIMEOUT_S:g}")
    wrong = ended.wrong(within_s=_TIMEOUT_S + _ENDING_S)
    if ended.run.code in (0, 75) or f"rank {rank} " not in ended.run.stderr.strip().splitlines()[-1]:
        wrong.append(f"exit code {ended.run.code}: {ended.run.stderr.strip().splitlines()[-1:]}")
    return Trial("SIGSTOP: named and ended", strategy, not wrong, problem="; ".join(wrong))


def _replicas_equal(ended: Ended, strategy: str) -> bool:
    """Whether ranks with the same stage have ended with the same weights."""
    traces = [ended.record.read(path.stem) for path in ended.record.folder.glob("end-*.json")]
    different = {(told["stage"], told["weights"]) for told in traces}
    return len(traces) == RANKS[strategy] and len(different) == len({stage for stage, _ in different})


# -- a long run: what it holds at its end is what it held at its beginning ---------------------------------------------

_EVERY = 50  # steps between checkpoints, and between evaluations
_WARM_UP = 0.05  # of the steps: by then all is allocated
_MOST_GROWTH = 16 * 2**10  # KB; a leak of 1 KB per step would be more


def soak(steps: int, folder: Path) -> Trial:
    """A run of the toy model; its trial names memory and descriptors after the warm-up and at the end."""
    often = [f"train.checkpoint_every={_EVERY}", f"train.eval_every={_EVERY}", "train.epochs=null"]
    started = Started([f"train.steps={steps}", *often, "logger=none", "device=cpu"], folder / "run", fresh=True)
    first = last = None
    try:
        while started.process.poll() is None:
            held = _held(started)
            if held is not None and _WARM_UP * steps <= held[0] < steps:
                first, last = first or held, held
            time.sleep(0.1)
        run = started.wait(1.0)
    finally:
        started.kill()
    wrong = corrupt(run.folder)
    if run.code != 0 or [line["step"] for line in run.steps] != list(range(1, steps + 1)):
        wrong.append(f"exit code {run.code} after {len(run.steps)} of {steps} steps")
    if len(run.evaluations) != steps // _EVERY:
        wrong.append(f"{len(run.evaluations)} evaluations")
    name = f"soak of {steps:,} steps"
    if first is None or last[0] - first[0] < steps / 2:
        wrong.append("it was over before it could be measured")
    else:
        (begin, memory, descriptors), (end, memory_at_end, descriptors_at_end) = first, last
        name += f": memory {memory:,} KB at step {begin:,} and {memory_at_end:,} KB at step {end:,}, "
        name += f"descriptors {descriptors} and {descriptors_at_end}"
        if memory_at_end - memory > _MOST_GROWTH or descriptors_at_end > descriptors + 2:
            wrong.append("it grew")
    return Trial(name, "single", not wrong, problem="; ".join(wrong))


def _held(started: Started) -> tuple[int, int, int] | None:
    """Step, resident memory in KB and open descriptors of the process; None before its first step, after its end."""
    try:
        with open(started.folder / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2000))
            step = json.loads(file.read().splitlines()[-1])["step"]
        process = psutil.Process(started.process.pid)
        return step, process.memory_info().rss >> 10, process.num_fds()
    except (OSError, LookupError, ValueError, psutil.Error):
        return None
