"""Tools that produced the results in this folder: they are run in a checkout, and no wheel contains them.

python -m benchmarks.comm         every all-reduce and step on an emulated cluster (network namespaces, root)
python -m benchmarks.reality      the simulator against that cluster
python -m benchmarks.validate     the simulator against published runs: writes docs/simulator_validation.md
python -m benchmarks.pictures     the simulator's pictures: writes docs/pictures/
python -m benchmarks.step         `hyperbatch bench step` with memory traffic and first steps
python -m benchmarks.unfinished   lists or runs what the records still lack
"""
