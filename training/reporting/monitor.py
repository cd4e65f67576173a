"""The metric that decides which weights of a run are the best (``train.monitor``), and the direction of metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.errors import TrainingError
from conf.messages import nearest

LOSS = "val_loss"
MINIMIZE, MAXIMIZE = "minimize", "maximize"
# Numbers of summary.json, without results of evaluations.
SUMMARISED = "final_loss first_loss step_time_s samples_per_s tokens_per_s mfu peak_memory_bytes bubble_fraction"
_KEYS = ("train.monitor", "train.monitor_direction")
_WORDS = {
    MINIMIZE: """loss losses error errors err perplexity ppl nll bce ce crossentropy kl kld mse rmse mae mape smape msle
        rmsle huber hinge brier wer cer eer ece fid kid lpips bits bpb bpc fpr fnr false wrong mistakes misses cost
        regret distance divergence deviation chamfer hausdorff time latency duration seconds memory bytes bubble""",
    MAXIMIZE: """accuracy acc correct f1 f2 fbeta precision recall sensitivity specificity auc auroc roc auprc ap map
        mrr ndcg hit hits top pass win wins success reward rewards return returns iou miou dice jaccard kappa mcc
        matthews pearson spearman correlation r2 similarity psnr ssim bleu sacrebleu chrf rouge meteor cider bertscore
        comet em exact match spearmanr agreement true tpr tnr likelihood loglikelihood throughput mfu""",
}  # fmt: skip
_DIRECTIONS = {word: direction for direction, words in _WORDS.items() for word in words.split()}
# The rest of the name says at which point a metric is measured: tpr_at_fpr_1, bits_per_byte.
_POINT = re.compile(r"_(?:at|per|to|vs|given)_|@")
_UNCLEAR = set(
    """gap drop std var variance delta diff difference change ratio scale weight threshold minus reduction improvement
    increase decrease gain saved savings free inverse length steps""".split()
)


class Monitor(NamedTuple):
    """A metric of evaluations to compare weights by.

    Attributes:
        name: The metric.
        direction: "minimize" or "maximize".
    """

    name: str
    direction: str

    @classmethod
    def of(cls, train: Any, name: str | None = None, typed: Any = None, keys: Sequence[str] = _KEYS) -> Monitor:
        """Return the monitor of a section ``train``, or the monitor of another metric.

        Args:
            train: The section ``train``.
            name: The metric; None for ``train.monitor``.
            typed: The typed direction; None for ``train.monitor_direction`` if ``name`` is ``train.monitor``, otherwise
                for the direction that the name implies.
            keys: The keys of the metric and of its direction, for the error.

        Raises:
            TrainingError: The direction is not typed, and the name does not imply it.
        """
        own: str = train.monitor or LOSS
        what = name or own
        typed = typed or (train.monitor_direction if what == own else None)
        if (direction := getattr(typed, "name", typed) or direction_of(what)) is None:
            how = f"{keys[1]}=minimize or {keys[1]}=maximize"
            raise TrainingError(f"{keys[0]}={what}: the name does not tell whether less or more is better; type {how}")
        return cls(what, direction)

    @property
    def sign(self) -> int:
        """1 if less is better, -1 if more is better."""
        return -1 if self.direction == MAXIMIZE else 1

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a finite value is better than the best one so far."""
        return math.isfinite(value) and (best is None or self.sign * value < self.sign * best)


def direction_of(name: str) -> str | None:
    """Return "minimize" or "maximize" for the name of a number; None if the name does not imply one.

    The last known word decides: "top1_error" is an error, "val_dice_loss" a loss.
    """
    head = _POINT.split(re.sub("cross_entropy", "crossentropy", name, flags=re.IGNORECASE))[0]
    words = [word.lower() for token in re.findall(r"[A-Za-z0-9]+", head) for word in _parts(token)]
    known = [direction for word in words if (direction := _known(word)) is not None]
    if not known or _UNCLEAR.intersection(words):
        return MAXIMIZE if re.search(r"_per_s(ec|econd)?$", name) else None
    # scikit-learn's neg_mean_squared_error is negated, true_negative_rate is not.
    negated = words[words[0] in ("val", "test")] in ("neg", "negative")
    return {MINIMIZE: MAXIMIZE, MAXIMIZE: MINIMIZE}[known[-1]] if negated else known[-1]


def _known(word: str) -> str | None:
    return _DIRECTIONS.get(word.lower()) or _DIRECTIONS.get(word.lower().rstrip("0123456789"))


def _parts(token: str) -> list[str]:
    """Split a token at its capitals, such as valLoss, unless it is a known word."""
    return [token] if _known(token) else re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+|\d+", token)


def evaluated(metrics: Sequence[str], language: bool, splits: Sequence[str] = ("val",)) -> list[str]:
    """Return the names of the results of evaluations.

    Args:
        metrics: The metrics of the model's loss.
        language: Whether the data are text, so that the results include a perplexity.
        splits: The evaluated splits.
    """
    return list(dict.fromkeys(f"{s}_{m}" for s in splits for m in ("loss", *metrics, *["perplexity"] * language)))


def check_name(key: str, name: str, known: Sequence[str]) -> None:
    """Check that a run will have the number that ``key`` names. Raises TrainingError."""
    if name not in known:
        raise TrainingError(f"{key}={name} is not a number of this run{nearest(f'{key}={{}}', name, known)}")
