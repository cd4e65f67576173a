"""Sweeps (`python train.py -m …`): each job leaves a record, and the records become a table, a figure and a page.

Jobs may run one after the other here, or on other machines, and may end in any way: so everything that the table
needs lies in files (see training.reporting.job_record), and nothing is passed in memory.
"""
