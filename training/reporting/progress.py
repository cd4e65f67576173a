"""The progress of a run or a command, with the remaining time."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from common.machine import terminal_width
from training.reporting.console import number

SECONDS_BETWEEN_LINES = 5.0
STEPS_IN_AVERAGE = 30


class Progress:
    """Shows step, loss, throughput and remaining time: as a bar on a terminal, otherwise as plain lines."""

    def __init__(self, total_steps: int, first_step: int = 1) -> None:
        """Open the bar if standard error is a terminal. An evaluation has no steps, and no bar."""
        self._total, self._stream, self._last_line = total_steps, sys.stderr, -math.inf
        self._recent: deque[tuple[float, int]] = deque(maxlen=STEPS_IN_AVERAGE + 1)
        self._bar = None
        if total_steps > 0 and terminal_width(self._stream) > 0:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps,
                initial=first_step - 1,
                file=self._stream,
                dynamic_ncols=True,
                miniters=1,  # otherwise the bar would not move for a while if steps take unequal times
                colour=None if os.environ.get("NO_COLOR") else "green",
                bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc}",
            )

    def update(self, record: Mapping[str, Any], note: str = "") -> None:
        """Show the record of a step, with a note at the end of the line.

        Without a terminal, only the first step, the last step and one step per ``SECONDS_BETWEEN_LINES`` are shown. Use
        ``say`` for messages that must always be shown. The remaining time is estimated from the last
        ``STEPS_IN_AVERAGE`` steps. The first step does not count, because it includes compilation and warm-up.
        """
        now, step = time.monotonic(), record["step"]
        self._recent.append((now, step))
        if self._bar is None and step < self._total and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        rate = "tokens_per_s" if "tokens_per_s" in record else "samples_per_s"
        text = f"loss {number('loss', record['loss'])}  {number(rate, record[rate])} {rate.replace('_per_', '/')}"
        text += f"  {number('mfu', record['mfu'])} MFU" if "mfu" in record else ""
        began, first = self._recent[0]
        if first < step < self._total:
            text += f"  {duration((now - began) / (step - first) * (self._total - step))} left"
        text += f"  {note}" * bool(note)
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self._last_line = now
            self.say(f"step {step:>{max(4, len(str(self._total)))}}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """Print ``text`` on a separate line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and move to a new line. A second call does nothing."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None


def duration(seconds: float) -> str:
    """Format seconds in at most two units: ``45 s``, ``1 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    rest = max(0, round(seconds))
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= size:
            return f"{rest // size} {name} {rest % size // smaller} {smaller_name}"
    return f"{rest} s"


def progress(done: int, total: int, since: float) -> str:
    """Format the progress and the remaining time of a command: ``18 of 27, 3 min 5 s left``.

    ``since`` is the monotonic time at which the first of ``total`` parts began.
    """
    left = (time.monotonic() - since) / done * (total - done)
    return f"{done} of {total}" + f", {duration(left)} left" * (done < total)
