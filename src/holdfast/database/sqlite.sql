-- This file and sqlite.sql of every other noun hold plain statements, one under each name. A name without a dot is a call, as in
-- postgres.sql. A name with a dot is a step of calls that take several statements: see sqlite_calls.py in the same folder.
-- {now} is the machine's clock in seconds. holdfast_gone(key) tells whether the kernel has freed the lock of a session's process.

-- name: session_look
-- From here on this connection takes queries alone. A connection that only reads waits for no writer.
pragma query_only = on;

-- name: schema_applied
select version, name, applied_at from holdfast_schema_version order by version;

-- name: hello.known_boot
select version from holdfast_schema_version where (select boot from holdfast_fence) = :boot order by version desc limit 1;

-- name: hello.raise_versions
-- Where the clock of this boot is behind, a minute of numbers is more than can have been lost.
update holdfast_object_version set first = (select place from holdfast_object_next) + 60000000
 where (select place from holdfast_object_next) > (select micros from holdfast_clock);

-- name: hello.raise_fence
update holdfast_fence set boot = :boot, last = case when last >= (select micros from holdfast_clock) then last + 60000000 else last end;

-- name: hello.version
select max(version) as version from holdfast_schema_version;

-- name: database.changes
select changes() as count;
