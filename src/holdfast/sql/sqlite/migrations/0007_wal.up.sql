-- The log of operations as people keep it: what expires is found without reading all.
create index holdfast_idempotency_log_expiring on holdfast_idempotency_log (expires_at) where result is not null and expires_at is not null;

insert into holdfast_schema_version (version, name) values (7, 'wal');
