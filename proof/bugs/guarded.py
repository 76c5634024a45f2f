"""A process under a guard, which writes down that it believes in it when it goes on after a pause: run as a process of
its own by its scene."""

import sys
import threading
import time

import holdfast
from holdfast.testing.history import Recorder, now

TTL = 3.0
_THREADS = 3
_SETTLE = 0.6
"""Seconds after which the first heartbeat is over, and the next is not due: whoever is stopped now is at work."""
_PAUSE = 0.2
"""Seconds. Who is held up for longer by a busy machine writes it down in vain, and harms nobody."""


def main(url: str, folder: str, key: str, ends_by: str) -> None:
    client = holdfast.Client(url)
    guard = (
        client.guard(key, ttl=TTL, heartbeat=TTL / 3)
        if ends_by == "kernel"
        else client.lease(key, ttl=TTL, on_lost="exit")
    )
    writing = threading.Lock()

    def work() -> None:
        since = now()
        while True:
            before, since = since, now()
            if since - before > _PAUSE:
                with writing:
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
