"""A program that works under a guard, and records when it still works after a pause. A scenario of C7 starts it."""

import sys
import threading
import time

import holdfast
from holdfast.testing.history import Recorder, now

TTL = 3.0
_THREADS = 3
_SETTLE = 0.6
"""Seconds after which the first heartbeat has ended and the next is not due: a process stopped then is working."""
_PAUSE = 0.2
"""Seconds. A busy machine may pause a thread for longer: then it records a belief that is correct."""


def main(url: str, folder: str, key: str, ends_by: str) -> None:
    client = holdfast.Client(url)
    guard = (
        client.guard(key, ttl=TTL, renew_every=TTL / 3)
        if ends_by == "kernel"
        else client.lease(key, ttl=TTL, on_lost="exit")
    )
    record_lock = threading.Lock()

    def work() -> None:
        since = now()
        while True:
            before, since = since, now()
            if since - before > _PAUSE:
                with record_lock:
                    record.info("believe", key, grant.fence, **{"from": since, "until": now()})

    with Recorder(folder, f"under {key}") as record, guard as grant:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        time.sleep(_SETTLE)
        sys.stdout.write("works\n")
        sys.stdout.flush()
        threads[0].join()


if __name__ == "__main__":
    main(*sys.argv[1:])
