"""What a run is: configuration, loop, checkpoints and reports. A Python program takes ``train`` and ``load_config``."""

from importlib.util import find_spec
from pathlib import Path


def _check_packages() -> None:
    """Check that this project's other packages are its own: a program may have a ``models`` or ``data`` on its path.

    Raises:
        ImportError: One is hidden; the message names the folder.
    """
    root = Path(__file__).resolve().parents[1]
    for name in ("common", "conf", "data", "launchers", "models", "parallel"):
        spec = find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin])
        if root / name not in [Path(place).resolve() for place in places]:
            raise ImportError(
                f"the package {name!r} of {root} is hidden by {places[0] if places else 'nothing'}, which comes before "
                f"it on sys.path: rename that, or begin the program with import sys; sys.path.insert(0, {str(root)!r})"
            )


_check_packages()

from training.command.api import Result, load_config, train, verify  # noqa: E402

__all__ = ["Result", "load_config", "train", "verify"]
