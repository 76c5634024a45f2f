delete from holdfast.schema_version where version = 5;
drop function holdfast.audit_list(integer, text, text);
drop function holdfast.audit_note(bigint, bigint, jsonb);
drop function holdfast.lease_force_release_if(text, bigint, text, text);
drop function holdfast.lease_wipe(text, uuid, jsonb);
drop function holdfast.shard_list(text);
drop function holdfast.slot_abandon(text, uuid, boolean);
drop function holdfast.slot_claim(text, integer, text, double precision, uuid, uuid, boolean, jsonb);
drop function holdfast.slot_list(text);
drop function holdfast.slot_rows(text);
drop index holdfast.lease_slot;
drop function holdfast.lease_recall(text, bigint);
drop function holdfast.beat_wanted(uuid);
drop function holdfast.lease_clear(text);
alter table holdfast.beat drop column wanted;
alter table holdfast.audit drop column fence;
create or replace function holdfast.waiters_name(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return name;
end $$;
