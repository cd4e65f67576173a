"""Sweeps (`python train.py -m …`). Each job leaves a record, and the records become a table, a figure and a page.

table.py   the rows: overrides and results of each job, and the comparison of jobs; sweep.csv and sweep.tex
figure.py  the figures
report.py  all files of the report, with the figures that report._figures yields

The table is made from the jobs' directories, because jobs may run on other machines and end in any way.
"""
