"""Many runs in one process: a plan of arms, grids and seeds, a row as each run ends, and one table at the end.

plan.py   TOML -> the runs, each with its config        rows.py    what is written as a run ends, and read again
sweep.py  trains what is missing (engine/session.py)    table.py   mean, deviation and interval of each point
page.py   the report that compares the arms             statistics.py  Student's t
"""
