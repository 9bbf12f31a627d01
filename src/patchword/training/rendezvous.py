"""How the processes of a job find each other, also after torchrun has restarted them.

torchrun keeps one key-value store over all attempts (torch 2.13), in which a process may find the address of one that
was killed: pytorch#167288. So the processes first agree on a prefix for the keys of this attempt. The restart count
would not do: every host has its own.
"""

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

POLL_SECONDS = 0.02


def elastic_store(rank: int, size: int, timeout: timedelta) -> Store | None:
    """Torchrun's store, without what earlier attempts have left in it; None: it was not torchrun that started us."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(agreed_prefix(store, rank, size, timeout), store)


def agreed_prefix(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A new name that all processes of this attempt know, and none of another one takes for its own.

    The first process proposes a name; the others sign it with names of their own, and it confirms what it has read. So
    nobody trusts a key of an earlier attempt: an old proposal is never confirmed to a new process.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("proposal", own)
        for signature in [f"{own}/signed/{other}" for other in range(1, size)]:
            store.wait([signature], timeout)
            store.set(f"{own}/confirmed/{store.get(signature).decode()}", "")
        return own
    end = time.monotonic() + timeout.total_seconds()
    signed = ""
    while time.monotonic() < end:
        proposal = store.get("proposal").decode()
        if proposal != signed:
            store.set(f"{proposal}/signed/{rank}", own)
            signed = proposal
        if store.check([f"{proposal}/confirmed/{own}"]):
            return proposal
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"Process {rank} of {size} has waited {timeout} for the first one.")
