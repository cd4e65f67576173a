"""Ranks that read other files than the first, as on machines that have them on disks of their own."""

from contextlib import nullcontext
from unittest.mock import patch

from composed import run_on_rank


def run_with_own(tree: dict, folder: str, meeting: str, key: str, paths: list[str], unseen: bool = False) -> dict:
    """For a pool of ranks: ``run_on_rank``, where the path ``key`` leads each rank to its own of ``paths``.

    ``unseen``: where those do not differ in what is compared of the files of ``model.init_from``.
    """
    import torch.distributed as dist

    *sections, name = key.split(".")
    section = tree[sections[0]] if sections else tree
    section[name] = paths[dist.get_rank()]
    from training.run.checks import ranks

    apart = patch("training.run.rank.check_ranks", lambda mesh, setup, alike: ranks.check_ranks(mesh, setup))
    hidden = patch.object(ranks, "digest_read", lambda cfg, chain: None) if unseen else nullcontext()
    with apart, hidden:
        return run_on_rank(tree, folder, meeting)
