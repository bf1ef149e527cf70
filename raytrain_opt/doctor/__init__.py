"""`raytrain-opt doctor`: what would go wrong on a cluster, found before a run is paid for.

`facts` are collected on every node, `checks` judge them (pure), `examine` does both.
"""
