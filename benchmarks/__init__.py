"""Speed, memory and quality, measured: ``python -m benchmarks.NAME [--quick] --json OUT``.

Every benchmark prints a table (with the reference figures beside it where there are some) and writes
one JSON object whose ``summary`` is flat. Ratios come from one run with its variants interleaved.
"""
