"""Read by Python at its start where this folder is on PYTHONPATH: lets a fault strike a run of train.py from within.

The product has no hooks for faults. When a process that has a plan of them imports ``training.run``, the functions in
question are wrapped, there and nowhere else.
"""

import importlib.abc
import os
import sys

_WHERE = "training.run"


class _Armed(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        from faults.inject import arm

        arm()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = _Armed(spec.loader)
        return spec


if "FAULTS" in os.environ:
    import importlib.util

    sys.meta_path.insert(0, _Finder())
