delete from holdfast.schema_version where version = 5;
drop function holdfast.peer_find(text);
drop function holdfast.peer_announce(text, uuid, text, text);
drop table holdfast.peer;
drop function holdfast.audit_list(integer, text, text, bigint);
drop function holdfast.audit_note(bigint, bigint, jsonb);
drop function holdfast.lease_force_release_if(text, bigint, text, text);
drop function holdfast.lease_wipe(text, uuid, text);
drop function holdfast.shard_list(text);
drop function holdfast.slot_abandon(text, uuid, boolean);
drop function holdfast.slot_release(text, integer, uuid);
drop function holdfast.slot_renew(text, integer, uuid);
drop function holdfast.slot_claim(text, integer, text, double precision, uuid, uuid, boolean, jsonb);
drop function holdfast.slot_list(text);
drop function holdfast.gate_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop function holdfast.elector_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop function holdfast.guard_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop function holdfast.slot_rows(text);
drop function holdfast.gate_trigger();
drop function holdfast.gate_require(text);
drop function holdfast.gate_close(text, text, text, boolean);
drop function holdfast.gate_open(text, double precision, text, text, uuid, jsonb);
drop function holdfast.own_name(text, text, text);
drop index holdfast.lease_slot;
drop function holdfast.lease_recall(text, bigint, text, text);
drop function holdfast.beat_wanted(uuid);
drop function holdfast.lease_clear(text);
alter table holdfast.beat drop column wanted;
create or replace function holdfast.waiters_name(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return name;
end $$;
