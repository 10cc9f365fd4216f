"""Many runs in one process: a plan of arms, grids and seeds, a row as each run ends, and one table at the end.

plan.py     TOML -> the runs, each with its config      values.py       what a plan file may hold, and how it is read
command.py  trains what is missing                      missing.py      which runs those are, and who makes them
trainer.py  a run -> its row (engine/session.py)        rows.py         what is written as a run ends, and read again
sharing.py  several commands in one folder
table.py    mean, deviation, interval of each point     statistics.py   Student's t
page.py     the report that compares the arms           charts.py       its pictures
"""
