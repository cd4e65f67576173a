"""Under torchrun, python layouts.py FOLDER WORD... -- NAME:WORDS...: a training of each layout, one after the other.

Rank 0 writes the bytes that have passed through its host's cable by the end of each to FOLDER/crossed.json.
"""

import json
import os
import sys
from pathlib import Path

import psutil
from composed import config, training

from launchers import World
from launchers.meeting import rendezvous


def crossed():
    link = psutil.net_io_counters(pernic=True)["cable"]
    return link.bytes_sent + link.bytes_recv


if __name__ == "__main__":
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    recipe, layouts = words[: words.index("--")], words[words.index("--") + 1 :]
    world, seen = World.detect(), {}
    for name, _, layout in (one.partition(":") for one in layouts):
        os.makedirs(folder / name, exist_ok=True)
        before = crossed()
        with rendezvous(world, 60.0) as met:
            training(config(*recipe, *layout.split()), folder / name, met)
        seen[name] = crossed() - before
    if world.rank == 0:
        (folder / "crossed.json").write_text(json.dumps(seen))
