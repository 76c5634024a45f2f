drop function holdfast.hello();
drop function holdfast.sql_version();
drop function holdfast.lease_protect_proven(text, text, boolean);
drop function holdfast.lease_protect_at_commit(text, uuid);
drop table holdfast.commit_check;
drop function holdfast.commit_check();
drop function holdfast.lease_protect(text, uuid);
drop function holdfast.snapshot_time();
drop function holdfast.fenced_out(text);
drop function holdfast.check_savepoint(xid);
drop function holdfast.lease_activity(double precision, integer);
drop function holdfast.activity_start(double precision, integer);
drop function holdfast.lease_history(text, integer);
drop function holdfast.lease_list(text);
drop function holdfast.purge();
drop function holdfast.beat_end(uuid);
drop function holdfast.beat_leases(uuid);
drop function holdfast.beat_release(uuid, text, bigint);
drop function holdfast.beat_renew(uuid);
drop function holdfast.owner_hold(bigint);
drop function holdfast.lease_force_release(text, text, text, boolean);
drop function holdfast.lease_abandon(text, uuid);
drop function holdfast.lease_release(text, text, uuid, boolean, boolean);
drop function holdfast.lease_await(text, bytea);
drop function holdfast.lease_status(text, uuid);
drop function holdfast.lease_renew(text, uuid);
drop function holdfast.lease_try(text, text, uuid, double precision);
drop function holdfast.beat_look(bytea);
drop function holdfast.limit_transaction(double precision);
drop function holdfast.protect_key(text);
drop function holdfast.lease_acquire(text, text, double precision, uuid, uuid, text, double precision, boolean, bigint, jsonb);
drop function holdfast.lease_take(text, text, text, double precision, uuid, uuid, text, double precision, boolean, bigint, jsonb);
drop type holdfast.lease_answer;
drop function holdfast.lease_end(holdfast.lease, text, boolean, text, text);
drop function holdfast.wake(text);
drop function holdfast.waiters_name(text);
drop function holdfast.wake_payload(text);
drop function holdfast.check_kind(text, text);
drop function holdfast.check_gateway(text);
drop function holdfast.check_name(text, text);
drop function holdfast.fence_ahead();
drop function holdfast.fence_raise(bigint, bigint);
drop function holdfast.current_space();
drop table holdfast.space;
drop function holdfast.random_space();
drop function holdfast.draw(regclass);
drop function holdfast.raise_number(regclass);
drop function holdfast.set_numbers(bigint, bigint, bigint);
drop function holdfast.clock_number();
drop function holdfast.server_life();
drop function holdfast.copy_id();
drop table holdfast.history;
drop function holdfast.history_trim();
drop table holdfast.lease;
drop table holdfast.beat;
drop sequence holdfast.fence, holdfast.version, holdfast.place, holdfast.raised_for;
drop table holdfast.schema_version;
-- Drop the schema only if the migration created it, and only if it holds no foreign objects.
do $$
declare
    ours boolean := (select m.our_schema from holdfast.meta m);
begin
    drop table holdfast.meta;
    if ours then
        begin
            drop schema holdfast;
        exception when dependent_objects_still_exist then
            raise notice 'schema holdfast is not dropped: it contains objects that holdfast did not create';
        end;
    end if;
end $$;
