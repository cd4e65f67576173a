"""Which layout: what a step of one would take, and the search for the best.

    work.py        what each layer computes, keeps and passes on, counted on tensors without memory
    layout.py      a layout as it is planned, and how it cuts the layers into stages
    memory.py      the memory of a rank, by part
    cluster.py     a cluster, as conf/cluster/NAME.yaml describes it
    here.py        what a step is made of on this machine, measured
    costs.py       the seconds of products, collectives and the optimizer, on paper and here
    simulation.py  when a pipeline's work runs: replayed in the order of a real run, and in a formula
    step.py        the seconds of a whole step, by part
    balance.py     the seconds of each layer, measured, and stages of equal cost
    search.py      all layouts that a model and a cluster allow, and the best of them

Nothing here knows of configurations and run directories.
"""
