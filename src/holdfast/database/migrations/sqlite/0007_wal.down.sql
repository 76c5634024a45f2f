delete from holdfast_schema_version where version = 7;
drop table holdfast_wal_archived;
drop index holdfast_idempotency_log_expiring;
drop index holdfast_idempotency_log_updated;
