"""The host time of small layers that two processes share."""

import pytest
import torch.distributed as dist

from benchmarks import tensor as benchmark
from parallel.axes import tensor
from parallel.mesh import TENSOR, Mesh

_COLLECTIVES = (
    (dist, "all_reduce", 0), (dist, "all_gather", 1), (tensor, "reduce_scatter", 1), (benchmark, "reduce_scatter", 1),
)  # fmt: skip


def sent() -> dict[tuple, list[tuple[str, int]]]:
    """On each rank: the collectives of each contender by name, with the elements of each."""
    mesh = Mesh({TENSOR: 2}, dist.get_rank()).connect(timeout_s=60.0)
    found = {}
    for key, step in benchmark.contenders(mesh).items():
        noted = found[key] = []
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, place in _COLLECTIVES:
                real = getattr(owner, name)

                def noting(*given, real=real, name=name, place=place, noted=noted, **more):
                    noted.append((name, given[place].numel()))
                    return real(*given, **more)

                patch.setattr(owner, name, noting)
            step()
    mesh.disconnect()
    return found


def test_the_collectives_that_are_timed_alone_are_those_of_the_layer(ranks):
    cut = [way for way, sequence in benchmark.WAYS.items() if sequence is not None]
    for found in ranks.run(2, sent):
        for layer, regions in benchmark.REGIONS.items():
            assert not found[layer, "plain", False]
            for way in cut:
                alone, within = found[layer, way, True], found[layer, way, False]
                assert sorted(alone) == sorted(within) and len(within) >= 2 * regions
