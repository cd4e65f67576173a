"""The configuration: Hydra's groups as YAML files, and the schemas that they are checked against.

An option of a group is a file ``conf/GROUP/OPTION.yaml``. Everything that lists, tests or measures options asks
``options`` for them, so that a new file is all that a new option needs.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def options(group: str) -> list[str]:
    """The names of a group's options, such as ``["classifier", "convnet", ...]`` for ``"model"``, sorted."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
