"""What an error means is read from it once."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from raytrain_opt.errors import is_lost_connection


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0"), False),
        (dist.DistBackendError("ncclUnhandledCudaError: out of memory"), False),
        (dist.DistBackendError("ncclInvalidUsage: invalid usage"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_lost_peer_is_told_from_errors_that_a_new_start_does_not_mend(
    error: Exception, expected: bool
) -> None:
    assert is_lost_connection(error) == expected
