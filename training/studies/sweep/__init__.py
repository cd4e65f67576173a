"""Sweeps (`python train.py -m …`). Each job leaves a record, and the records become a table, a figure and a page.

table.py   the rows: overrides and results of each job, and the comparison of jobs
figure.py  the figures
report.py  sweep.csv, sweep.png and report.html, with the figures that report._figures yields

The table is made from the jobs' directories, because jobs may run on other machines and end in any way.
"""
