"""Sweeps (`python train.py -m …`): each job leaves a record, and the records become a table, a figure and a page.

table.py   the rows: the overrides and the results of each job, and how jobs compare
figure.py  the figures
report.py  sweep.csv, sweep.png and report.html, with the figures that report._figures yields

The table is made from the directories of the jobs, because jobs may run on other machines and end in any way.
"""
