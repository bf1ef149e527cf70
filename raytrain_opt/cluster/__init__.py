"""Ray itself, below the pools: connections, resources, processes.

Start with `connection` (connect or start Ray). `fork_server` and `fork_client` start processes
that have their imports; `resources` plans what workers and slots ask for, and waits
for nodes that are on their way; `actor_tree` ends an actor with everything it
started; `ray_private` holds every use of an undocumented Ray API.

May import config and the foundations (errors, clock).
"""
