"""A run under the URI of an object storage.

`RunCopy` fetches a run to resume it and copies what it writes; `Lease` lets one process at a time
write. Start reading with `run_copy`.

May import `storage` and the foundations.
"""
