"""A contender in a process of its own: acquires when asked, prints its fence, and holds the lease until released."""

from __future__ import annotations

import json
import sys

import holdfast


def main(url: str, name: str, ttl: str) -> None:
    with holdfast.Client(url) as client:
        client.leases.get(name)
        grant = None
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            if line == "release\n":
                if grant is not None:
                    grant.release()
                grant = None
            else:
                grant = grant or client.lease(name, ttl=float(ttl)).try_acquire()
            sys.stdout.write(json.dumps(grant.fence if grant else None) + "\n")
            sys.stdout.flush()
