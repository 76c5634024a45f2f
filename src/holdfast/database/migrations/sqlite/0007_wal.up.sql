-- Maintenance of the log of operations: find expired results and the latest rows without reading the whole log.
create index holdfast_idempotency_log_expiring on holdfast_idempotency_log (expires_at) where result is not null and expires_at is not null;
create index holdfast_idempotency_log_updated on holdfast_idempotency_log (updated_at);
-- Places of archived rows: a cursor that stands on one is still valid.
create table holdfast_wal_archived (place integer primary key);

insert into holdfast_schema_version (version, name) values (7, 'wal');
