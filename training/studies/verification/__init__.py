"""Proves for a model that every layout trains as one process does: probes its layers, and compares the layouts.

probes.py      checks whether the results of a layer can depend on the layout
layouts.py     runs of layouts, compared with one process
difference.py  the first number that differs
recording.py   records the inputs and outputs of every layer, for difference.py
report.py      the certificate

``python train.py mode=verify model=NAME``, or from Python::

    from training import verify

    report = verify("model=gpt2", "model.size=tiny")
    assert report.ok, report
"""
