"""Which layout: what a step of one would take, and the search for the best.

    work.py        what each layer computes, keeps and passes on, counted on tensors without memory
    cluster.py     a cluster, as conf/cluster/NAME.yaml describes it
    here.py        what a step is made of on this machine, measured
    costs.py       the seconds of products, collectives and the optimizer, on paper and here
    simulation.py  when a pipeline's work runs: replayed in the order of a real run, and in a formula
    step.py        the seconds and the memory of a whole step, by part
    search.py      all layouts that a model and a cluster allow, and the best of them

Nothing here knows of configurations and run directories.
"""
