"""Zero-bubble schedules, with backwards in two parts and with orders that are planned for measured times.

They are used only through two entries of ``parallel.schedules.SCHEDULES``: ``interleaved_zero_bubble``, in torch's
order, and ``planned``.

    order.py           the order of a pipeline's work with the shortest simulated makespan
    split_backward.py  the gradients of a stage's inputs now, those of its weights later
    schedule.py        torch's stage and schedule, which use these two
"""
