"""Predicts the seconds and the memory of a training step in a layout, and searches for the fastest layout.

    work.py        what each layer computes, stores and passes on, per sample
    counting.py    the torch mode that counts this work, on tensors without memory
    layout.py      a layout as the planner sees it, and how it cuts the layers into stages
    memory.py      the memory of a rank, by part
    cluster.py     a cluster, as conf/cluster/NAME.yaml describes it
    here.py        measurements of this machine: layers, strategies, messages
    costs.py       the seconds of products, collectives and the optimizer, on paper and here
    simulation.py  the timeline of a pipeline: a replay in the order of a real run, and a formula
    step.py        the seconds of a whole step, by part
    balance.py     the measured seconds of each layer, and stages of equal cost
    search.py      all layouts that a model and a cluster allow, and the best layouts

No module here reads configurations or run directories.
"""
