#!/bin/sh
# The migration step of a deploy that starts on many machines at once: one migrates, the others wait until it is done, and
# then find nothing to do. HOLDFAST_URL is in the environment; the application's migrations may go to another database.
set -eu

# The tables of holdfast itself: safe from every machine at once.
holdfast migrate up

# Waits ten minutes at most (exit code 75 then). If this machine loses the lease, the migration is ended before another
# machine may begin. MIGRATE: the application's own command, e.g. alembic upgrade head.
exec holdfast run --timeout 600 --ttl 60 app-migration -- sh -c "${MIGRATE:-alembic upgrade head}"
