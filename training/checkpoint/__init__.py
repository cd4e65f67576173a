"""Checkpoints: safetensors files keyed by global names, and a JSON manifest. Nothing is pickled.

    checkpoints/step-00000050/manifest.json
                              model-00.safetensors       parameters and buffers of stage 0
                              optimizer-00.safetensors   "<parameter>/<key>": exp_avg, …
    checkpoints/latest -> step-00000050
    checkpoints/best   -> step-00000040                  the best evaluation (train.monitor); never removed

Every layout can load a checkpoint that any other layout has saved: a tied parameter is saved once, under its canonical
name, and each rank reads the tensors that it needs from the files that contain them.
"""
