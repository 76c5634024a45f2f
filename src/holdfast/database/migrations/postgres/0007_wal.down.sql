delete from holdfast.schema_version where version = 7;
drop trigger wal_settle on holdfast.space;
drop function holdfast.wal_read(bigint, xid8, bigint, int, bigint), holdfast.wal_settle(), holdfast.wal_chains(text[]),
    holdfast.wal_keys(text, double precision, text, int), holdfast.wal_latest(int), holdfast.wal_find(text),
    holdfast.operation_expire(int, text, text), holdfast.operation_health(double precision, int),
    holdfast.operation_activity(double precision, integer, integer), holdfast.operation_indexes();
drop table holdfast.wal_archived;
drop index holdfast.idempotency_log_expiring, holdfast.idempotency_log_updated;
