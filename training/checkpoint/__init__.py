"""Checkpoints: safetensors files keyed by global names, and a JSON manifest. Nothing is pickled.

    checkpoints/step-00000050/manifest.json
                              model-00.safetensors       parameters and buffers of stage 0
                              optimizer-00.safetensors   "<parameter>/<key>": exp_avg, …
    checkpoints/latest -> step-00000050
    checkpoints/best   -> step-00000040                  the lowest validation loss; never removed

What one layout has saved any other loads: a tied parameter is saved once, under its canonical name, and each rank
reads what it needs from whichever file has it.

A save goes through these phases. A run that is killed in any of them leaves the older checkpoints as they were:

    snapshot.copy_files      each writing rank copies its tensors; from here on training continues
    snapshot.write_file      the files of each stage, flushed and hashed, into the draft .step-00000050.ATTEMPT.tmp
    snapshot.write_sidecar   stage-00.json in the draft: these files are complete (or: what went wrong)
    commit.await_stages      rank 0 waits for the sidecar of every stage
    commit.write_manifest    manifest.json: step, layout, size and sha256 of each file
    commit.publish           the draft gets its name
    commit.update_link       ``latest``, and ``best`` where it is
    commit.remove_old        only now are older checkpoints removed
"""

from training.checkpoint.commit import set_current
from training.checkpoint.load import load, locate, newest, newest_whole, read_manifest, read_weights
from training.checkpoint.manifest import MANIFEST
from training.checkpoint.save import Checkpoints

__all__ = [
    "MANIFEST",
    "Checkpoints",
    "load",
    "locate",
    "newest",
    "newest_whole",
    "read_manifest",
    "read_weights",
    "set_current",
]
