"""Tools that produced the results in this folder. They are run from a checkout, and no wheel contains them.

python -m benchmarks.comm         every all-reduce and step on an emulated cluster (network namespaces, root)
python -m benchmarks.reality      compares the simulator with that cluster
python -m benchmarks.validate     compares the simulator with published runs: writes docs/simulator_validation.md
python -m benchmarks.pictures     the simulator's pictures: writes docs/pictures/
python -m benchmarks.step         `hyperbatch bench step` with memory traffic and first steps
python -m benchmarks.unfinished   lists or runs the runs that the records still lack
"""
