"""The promise, proved for a model: its layers are probed, and every layout is compared with one process.

``python train.py mode=verify model=NAME``, or from Python::

    from training import verify

    report = verify("model=gpt2", "model.size=tiny")
    assert report.ok, report
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.composition import key_of
from training.api import run_words
from training.app import plain

if TYPE_CHECKING:
    from data.dataset import DataSet
    from models.chain import Chain
    from training.verification.report import Report


def verify(
    *overrides: str, config: Any = None, model: Chain | None = None, data: DataSet | tuple | None = None
) -> Report:
    """Verify a model under every layout, as ``python train.py mode=verify *overrides`` does.

    Args:
        *overrides: Words of the command line. With ``parallel=NAME``, that layout only.
        config: See ``training.train``.
        model: See ``training.train``.
        data: See ``training.train``.

    Returns:
        The report; ``report.ok`` says whether everything holds, and ``str(report)`` what does not.

    Raises:
        UserError: For words, a model or data that no run could use.
    """
    words = ["mode=verify", *(word for word in overrides if not word.startswith("mode="))]
    typed = [key_of(word) for word in overrides]
    if config is not None:  # all in it is the user's choice
        words, typed = list(overrides), ["train.precision", "train.global_batch_size", "parallel"]

    def act(cfg: Any, run_dir: Path, *_: Any) -> Report:
        from training.verification.report import prove

        return prove(plain(cfg, None), run_dir, typed)

    return run_words(act, words, config, model, data)
