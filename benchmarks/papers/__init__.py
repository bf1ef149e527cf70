"""The five source papers, table by table: one module and one command for each.

Results are in docs/papers.md. Imports the package and the benchmarks.
"""
