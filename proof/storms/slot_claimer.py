"""One process of the storm: threads that claim slots, hold them for a moment and release them, and record when they
trusted them. ``python -m proof.storms.slot_claimer URL FOLDER NAME THREADS``"""

from __future__ import annotations

import os
import random
import sys
import threading
import time

import holdfast
from holdfast.testing.history import Recorder, now

CAPACITY, TTL = 4, 3.0


def main(url: str, folder: str, name: str, threads: int) -> None:
    client = holdfast.Client(url)
    slots = client.slots("storm", CAPACITY, ttl=TTL)
    over = threading.Event()
    record_lock = threading.Lock()

    def claim(number: int, record: Recorder) -> None:
        owner = f"{os.getpid()}-{number}"
        while not over.is_set():
            try:
                grant = slots.claim(owner=owner, timeout=random.choice([0.0, 0.2, 1.0]))
            except holdfast.HoldfastError:
                time.sleep(random.uniform(0.0, 0.05))
                continue
            began = now()
            time.sleep(random.uniform(0.0, 0.02))
            ended = now()
            if not grant.lost:
                with record_lock:
                    record.info("believe", grant.name, grant.fence, **{"from": began, "until": ended})
            try:
                grant.release()
            except holdfast.HoldfastError:
                continue

    with Recorder(folder, name) as record:
        working = [threading.Thread(target=claim, args=(number, record), daemon=True) for number in range(threads)]
        for thread in working:
            thread.start()
        sys.stdout.write("works\n")
        sys.stdout.flush()
        sys.stdin.readline()
        over.set()
        for thread in working:
            thread.join()
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
