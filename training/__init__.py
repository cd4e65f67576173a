"""What a run is: configuration, loop, checkpoints and reports. A Python program takes ``train`` and ``load_config``."""

from training.api import Result, load_config, train

__all__ = ["Result", "load_config", "train"]
