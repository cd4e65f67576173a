"""The promise, proved for a model: its layers are probed, and every layout is compared with one process.

``python train.py mode=verify model=NAME``, or from Python::

    from training import verify

    report = verify("model=gpt2", "model.size=tiny")
    assert report.ok, report
"""
