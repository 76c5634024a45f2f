delete from holdfast.schema_version where version = 8;
drop trigger relay_settle on holdfast.space;
drop function holdfast.relay_read(xid8, bigint, int), holdfast.relay_open(text, text, uuid),
    holdfast.relay_begin(text, text, uuid, text),
    holdfast.relay_move(text, text, uuid, bigint, xid8, bigint, bigint, text, text, text, text, text, text), holdfast.relay_list(),
    holdfast.relay_parked(text, boolean, int), holdfast.relay_retry(text, text), holdfast.relay_remove(text, text, text), holdfast.relay_settle(),
    holdfast.wal_archive(text, text, text, int, text, text, text),
    holdfast.relay_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop index holdfast.outbox_key;
drop table holdfast.parked;
drop table holdfast.relay;
