"""Many runs in one process: a plan of arms, grids and seeds, a row as each run ends, and one table at the end.

plan.py     TOML -> the runs, each with its config      rows.py         what is written as a run ends, and read again
command.py  trains what is missing                      trainer.py      a run -> its row (engine/session.py)
table.py    mean, deviation, interval of each point     statistics.py   Student's t
page.py     the report that compares the arms           charts.py       its pictures
"""
