"""`raytrain-opt doctor`: find what would go wrong on a cluster before paying for a run.

Start reading at `diagnose`, which asks every node and prints a table. `facts` runs on the nodes,
`checks` judges the facts (pure: facts in, findings out) and prints the table of findings,
`exchange` times an all-reduce.

May import cluster, execution.preflight, report.formatting, search.factory, monitoring, config and
the foundations.
"""
