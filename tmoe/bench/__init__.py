"""Benchmarks of expert layers: cases, clocks, floors, predictions, and reports of them.

`tmoe bench` measures with this package, and so do the files of `bench/`, which run single
operations under pytest-benchmark. Nothing of tmoe imports it but the command.
"""
