"""Proof, for one model, that every layout trains as one process does: probes of its layers, and comparisons of layouts.

probes.py      checks whether a layer's results can depend on the layout
layouts.py     runs layouts, and compares them with one process
difference.py  finds the first number that differs
recording.py   records the inputs and outputs of every layer, for difference.py
report.py      writes the certificate

``python train.py mode=verify model=NAME``, or from Python::

    from training import verify

    report = verify("model=gpt2", "model.size=tiny")
    assert report.ok, report
"""
