"""Checkpoints: safetensors files keyed by global names, and a JSON manifest. Nothing is pickled.

    checkpoints/step-00000050/manifest.json
                              model-00.safetensors       parameters and buffers of stage 0
                              optimizer-00.safetensors   "<parameter>/<key>": exp_avg, …
    checkpoints/latest -> step-00000050
    checkpoints/best   -> step-00000040                  the lowest validation loss; never removed

What one layout saved any other loads: a tied parameter stands once, under its canonical name, and each rank takes
what it needs out of whichever file has it.

A save goes through these phases; a run that is killed in any of them leaves the older checkpoints as they were:

    snapshot.copied          each writing rank copies its tensors; from here on training goes on
    writing.write_stage      files of each stage, flushed and hashed, into the draft .step-00000050.ATTEMPT.tmp
    writing.leave_sidecar    stage-00.json there: these files are whole (or: what went wrong)
    commit.await_stages      rank 0 waits for every stage's sidecar
    commit.write_manifest    manifest.json: step, layout, size and sha256 of each file
    commit.publish           the draft gets its name
    commit.point             ``latest``, and ``best`` where it is
    commit.remove_old        only now older ones go
"""

from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.finding import locate, newest, newest_whole, read_manifest, set_current
from training.checkpoint.paths import MANIFEST
from training.checkpoint.reading import load

__all__ = ["MANIFEST", "Checkpoints", "load", "locate", "newest", "newest_whole", "read_manifest", "set_current"]
