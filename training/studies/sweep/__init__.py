"""Sweeps (`python train.py -m …`): each job leaves a record, and the records become a table, a figure and a page.

Jobs may run on other machines and end in any way, so everything that the table needs is in the jobs' directories.
"""
