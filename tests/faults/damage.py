"""A file of the newest checkpoint damaged: that is found and said, and the checkpoint before is gone on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from faults.compare import differences
from faults.plan import Fault
from faults.runs import launch
from faults.table import Trial


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit-flipped": _flip,
    "deleted": Path.unlink,
}
FILES = ("model-00.safetensors", "optimizer-00.safetensors", "manifest.json")
_STEPS, _STOPPED_AFTER = 8, 5


def damage(strategy: str, folder: Path, damages=tuple(DAMAGES), files=FILES) -> list[Trial]:
    """Each kind of damage to each kind of file."""
    undisturbed = launch(strategy, _STEPS, folder / "undisturbed")
    half = launch(strategy, _STEPS, folder / "half", [Fault("term", 0, "forward", _STOPPED_AFTER)])
    assert (undisturbed.run.code, half.run.code) == (0, 75), undisturbed.run.console + half.run.console
    trials = []
    for kind in damages:
        for name in files:
            hurt = folder / f"{kind}-{name}"
            shutil.copytree(half.run.folder, hurt / "run", symlinks=True)
            newest = (hurt / "run" / "checkpoints" / "latest").resolve()
            DAMAGES[kind](newest / name)
            ended = launch(strategy, _STEPS, hurt, [], "train.resume=auto")
            wrong = differences(ended, undisturbed)
            if newest.name not in ended.run.console or "damaged" not in ended.run.console:
                wrong.append(f"nothing was said of {newest.name}")
            begun = ended.record.read("begun-0-0")
            lost = _STOPPED_AFTER + 1 - begun["first_step"] if begun else None
            survived = ended.run.code == 0 and lost == 1
            trials.append(Trial(f"checkpoint file {kind}", strategy, survived, lost, not wrong, "; ".join(wrong[:2])))
    return trials
