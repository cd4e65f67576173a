"""Proves for a model that every layout trains as one process does: probes its layers, and compares the layouts.

``python train.py mode=verify model=NAME``, or from Python::

    from training import verify

    report = verify("model=gpt2", "model.size=tiny")
    assert report.ok, report
"""
