"""How the processes of a job find each other, also after torchrun has restarted them.

torchrun keeps one key-value store over all attempts (torch 2.13), in which a process can find the address of one that
was killed (https://github.com/pytorch/pytorch/issues/167288). So the processes first agree on a key prefix for this
attempt. The restart count does not work as a prefix, because every host has its own.
"""

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

POLL_SECONDS = 0.02


def elastic_store(rank: int, size: int, timeout: timedelta) -> Store | None:
    """Return torchrun's store without the keys of earlier attempts; None if torchrun did not start this process."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(agree_on_prefix(store, rank, size, timeout), store)


def agree_on_prefix(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a new prefix that all processes of this attempt share with no process of another attempt.

    The first process proposes a prefix, the others sign it with a random name, and the first confirms each signature.
    A key of an earlier attempt is never trusted, because an old proposal is never confirmed to a new process.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("proposal", own)
        for signature in [f"{own}/signed/{other}" for other in range(1, size)]:
            store.wait([signature], timeout)
            store.set(f"{own}/confirmed/{store.get(signature).decode()}", "")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    signed = ""
    while time.monotonic() < deadline:
        proposal = store.get("proposal").decode()
        if proposal != signed:
            store.set(f"{proposal}/signed/{rank}", own)
            signed = proposal
        if store.check([f"{proposal}/confirmed/{own}"]):
            return proposal
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"Process {rank} of {size} waited {timeout} for the first process.")
