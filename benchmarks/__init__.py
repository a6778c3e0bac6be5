"""The benchmarks: one command for each group of claims, for example `python -m benchmarks.wire`.

Run them from the root of the repository. Each benchmark is a package: `__main__.py` lists the rows of its table, and
the other files measure them. All of them share with the tests what lies in tests/support: `measure.py` (the command
line), `record.py` (results/) and `launch.py` (ranks on this machine). Of the tests they import
nothing else. `unchanged.py` compares two versions of the sources instead. `benchmarks/tests` has the benchmarks' tests.
"""
