"""Zero-bubble schedules, with backwards in two parts and with orders planned for measured times.

Only two entries of ``parallel.schedules.SCHEDULES`` use them: ``interleaved_zero_bubble``, in torch's
order, and ``planned``.

    order.py           the order of a pipeline's work with the shortest simulated makespan
    split_backward.py  the gradients of a stage's inputs first, the gradients of its weights later
    schedule.py        torch's stage and schedule, which use these two
"""
