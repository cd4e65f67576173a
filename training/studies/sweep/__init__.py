"""Sweeps (`python train.py -m …`): each job leaves a record, and the records become a table, a figure and a page.

table.py   the rows: what each job was, how it ended (row.summary is its summary.json), and how jobs compare
figure.py  the figures
report.py  sweep.csv, sweep.png and report.html, with the figures that report._figures yields

Jobs may run on other machines and end in any way, so everything that the table needs is in the jobs' directories.
"""
