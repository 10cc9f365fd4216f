"""Many runs in one process: a plan of arms, grids and seeds gives a row as each run ends, and one table at the end.

plan.py     TOML -> the runs, each with its config      values.py       reads and checks the values of a plan file
command.py  trains the missing runs                     missing.py      finds them and divides them among commands
trainer.py  a run -> its row (engine/session.py)        rows.py         writes a row as a run ends, and reads rows
sharing.py  several commands in one folder
table.py    mean, deviation, interval of each point     statistics.py   Student's t
page.py     the report that compares the arms           charts.py       its charts
"""
