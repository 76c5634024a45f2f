#!/bin/sh
# The migration step of a deploy that starts on many machines at once: one machine migrates, the others wait for it and then
# have nothing to do. HOLDFAST_URL is in the environment; the application's migrations may use another database.
set -eu

# The tables of holdfast itself: safe on all machines at once.
holdfast migrate up

# Waits at most ten minutes (then exit code 75). If this machine loses the lease, the migration is ended before another
# machine may begin. MIGRATE: the application's own command, e.g. alembic upgrade head.
exec holdfast run --timeout 600 --ttl 60 app-migration -- sh -c "${MIGRATE:-alembic upgrade head}"
