-- Of this file and of sqlite.sql of every other noun. The names are those in postgres.sql. Here each is a short script, run
-- in one BEGIN IMMEDIATE unless it only reads. The first row a statement returns becomes parameters of the statements after it, the last one is the answer.
-- A statement under "-- stop" ends the script when it returns a row; leading ones are asked first without the write
-- lock, so that a refusal writes nothing and waits for nobody; one that writes and is the first is tried by itself before
-- there is a transaction. In the place of "-- as: name" stands all of that statement.
-- A commit waits for the disk, but for statements under "-- volatile": what they say ends with the machine, be it lost or not.
-- {now} is the machine's clock in seconds, and holdfast_gone(key) tells whether the kernel has freed the lock of a
-- session's process.

-- name: session_look
-- From here on this connection takes queries alone. Whoever only looks waits for nobody who writes.
pragma query_only = on;

-- name: schema_applied
select version, name, applied_at from holdfast_schema_version order by version;

-- name: hello
-- stop
select version from holdfast_schema_version where (select boot from holdfast_fence) = :boot order by version desc limit 1;
update holdfast_object_version set first = (((select last from holdfast_object_place) >> 28) + 1) << 28;
update holdfast_fence set last = ((last >> 32) + 1) << 32, boot = :boot;
select max(version) as version from holdfast_schema_version;
