-- Functions for the recipes on leases that must be one transaction: claim any free slot of a pool, wipe under a guard,
-- force-release only the grant that the operator saw. The audit records fences.

alter table holdfast.audit add column fence bigint;
comment on column holdfast.audit.fence is 'of the lease under which the action was done';

alter table holdfast.beat add column wanted uuid[];
comment on column holdfast.beat.wanted is 'tokens of leases that an operator has recalled';

-- Finds the slots of one pool without reading all leases.
create index lease_slot on holdfast.lease (name text_pattern_ops) where name like '@slot:%';

-- A waiter waits for any slot of its pool, under the pool's name.
create or replace function holdfast.waiters_name(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return case when name like '@slot:%' then regexp_replace(name, ':[0-9]+$', '') else name end;
end $$;

-- Claim any free slot, that is, one of the leases '<pool>:1' to '<pool>:<capacity>'. The numbers bound how many claims there
-- are. Only while a higher number is still held, after the capacity was reduced, must claims be counted, one claim at a time.
-- status and the other columns are those of lease_acquire; a refused claim writes nothing.
create function holdfast.slot_claim(
    pool text, capacity integer, holder text, ttl_seconds double precision,
    inout token uuid, inout beat uuid, solo boolean, process jsonb,
    out name text, out status text, out fence bigint, out held_by text, out remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    want uuid := slot_claim.token;
    with_beat uuid := slot_claim.beat;
    r record;
    a record;
    held integer;
    over boolean;
begin
    if capacity is null or capacity not between 1 and 100000 then
        raise exception 'capacity must be from 1 to 100000, not %', capacity using errcode = 'invalid_parameter_value';
    end if;
    token := null; beat := null;
    select s.name into name from holdfast.slot_rows(pool) s where s.token = want;
    if not found then
        for attempt in 1..2 loop
            select count(*), coalesce(bool_or(s.slot > capacity), false), min(s.remaining), min(s.holder) into held, over, remaining, held_by
              from holdfast.slot_list(pool) s;
            if held >= capacity then
                status := 'held';
                return;
            end if;
            exit when not over or attempt = 2;
            if not pg_try_advisory_xact_lock(hashtext('holdfast.take'), hashtext(pool)) then
                status := 'busy'; remaining := null;
                return;
            end if;
        end loop;
    end if;
    for r in select pool || ':' || n as slot, n from generate_series(1, capacity) n
              where name is null and not exists (select from holdfast.slot_list(pool) s where s.slot = n)
              union all select name, 0 where name is not null order by 2 loop
        select * into a from holdfast.lease_acquire(r.slot, slot_claim.holder, ttl_seconds, want, with_beat, false, 0, solo, null, process);
        if a.fence is not null or a.status = 'beat_lost' then
            name := r.slot; status := a.status; token := a.token; beat := a.beat; fence := a.fence; held_by := a.held_by; remaining := a.remaining;
            return;
        end if;
    end loop;
    status := 'busy'; name := null; remaining := null; held_by := null;
end $$;

-- Slot leases of a pool, live or expired. The index has these operators: the prefix match is independent of the collation.
create function holdfast.slot_rows(pool text) returns setof holdfast.lease
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    return query select * from holdfast.lease l
     where l.name like '@slot:%' and l.name ~>=~ (pool || ':') and l.name ~<~ (pool || ';')
       and substr(l.name, length(pool) + 2) ~ '^[1-9][0-9]{0,5}$';
end $$;

create function holdfast.slot_list(pool text)
returns table (name text, slot integer, holder text, fence bigint, remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.name, substr(l.name, length(pool) + 2)::integer, l.holder, l.fence,
           extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.slot_rows(pool) l join holdfast.beat b on b.id = l.beat
     where not b.dead and b.expires_at > clock_timestamp() order by 2;
end $$;

-- Undo a claim whose reply was lost: the caller does not know its slot.
create function holdfast.slot_abandon(pool text, token uuid, with_beat boolean) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    found_name text;
begin
    select s.name into found_name from holdfast.slot_rows(pool) s where s.token = slot_abandon.token;
    if not found then
        return false;
    end if;
    return case when with_beat then holdfast.lease_abandon(found_name, token) else holdfast.lease_release(found_name, token, false, false) end;
end $$;

-- Delete every lease but the guard's and those in ``keep``. Returns null and changes nothing unless the token holds the
-- guard; the lock on its row prevents a takeover until the commit. All other leases are locked before the first one ends
-- (55P03 if a protected transaction does not finish), because a renewal holds its lease while it waits for the beat, which
-- the end of a lease writes. One statement ends them all and notifies for every name, whether there are waiters or not:
-- calling wake() and lease_end() for tens of thousands of leases would fill the server's lock table and rewrite the same beat.
create function holdfast.lease_wipe(guard text, token uuid, keep jsonb default '[]') returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '1s' as $$
declare
    by_holder text;
    ended int;
begin
    select x.holder into by_holder from holdfast.lease x join holdfast.beat b on b.id = x.beat
     where x.name = guard and x.token = lease_wipe.token and not b.dead and b.expires_at > clock_timestamp() for share of x;
    if not found then
        return null;
    end if;
    perform from holdfast.lease x where x.name <> guard and not keep ? x.name order by x.name for update;
    with l as materialized (
        select * from holdfast.lease x where x.name <> guard and not keep ? x.name order by x.name for update skip locked
    ), past as (
        insert into holdfast.history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
        select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, clock_timestamp(), 'forced', by_holder,
               'wiped under guard ' || quote_literal(guard)
          from l left join holdfast.beat b on b.id = l.beat order by l.name
    ), told as (
        update holdfast.beat b set generation = b.generation + 1 where not b.solo and b.id in (select l.beat from l)
    ), alone as (
        delete from holdfast.beat b where b.solo and b.id in (select l.beat from l)
    ), gone as (
        delete from holdfast.lease x using l where x.name = l.name
    )
    select count(pg_notify('holdfast.free', case when l.name like '@slot:%' then regexp_replace(l.name, ':[0-9]+$', '') else l.name end))
      into ended from l;
    return ended;
end $$;

-- lease_force_release, but only if the lease still has this fence.
create function holdfast.lease_force_release_if(name text, fence bigint, actor text, reason text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform from holdfast.lease l where l.name = lease_force_release_if.name and l.fence = lease_force_release_if.fence for update nowait;
    return found and holdfast.lease_force_release(name, actor, reason, false);
end $$;

-- Ask the holder to release the lease when its work has stopped: it learns of it with its next heartbeat. The lease is not
-- taken away, and its row is not written: a write would abort the transactions that it protects.
create function holdfast.lease_recall(name text, fence bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.beat b set generation = b.generation + 1, wanted = array_append(array_remove(b.wanted, l.token), l.token)
      from holdfast.lease l where l.name = lease_recall.name and l.fence = lease_recall.fence and b.id = l.beat
       and not b.dead and b.expires_at > clock_timestamp();
    return found;
end $$;

create function holdfast.beat_wanted(beat uuid) returns table (token uuid)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select unnest(b.wanted) from holdfast.beat b where b.id = beat_wanted.beat;
end $$;

-- Purge if this lease has expired. Without this, an expired lease keeps its row until some process purges.
create function holdfast.lease_clear(name text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if exists (select from holdfast.lease l where l.name = lease_clear.name
                  and not exists (select from holdfast.beat b where b.id = l.beat and not b.dead and b.expires_at > clock_timestamp())) then
        perform holdfast.purge();
        return true;
    end if;
    return false;
end $$;

-- Add the fence and details to an entry that has not ended.
create function holdfast.audit_note(entry bigint, fence bigint, detail jsonb) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.audit a set fence = coalesce(audit_note.fence, a.fence), detail = coalesce(audit_note.detail, a.detail)
     where a.id = entry and a.outcome is null and a.role = session_user;
    return found;
end $$;

create function holdfast.audit_list(max_rows integer default 100, only_action text default null, only_actor text default null)
returns table (id bigint, at double precision, actor text, role text, action text, subject text, reason text, fence bigint, detail jsonb,
               outcome text, ended_at double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select a.id, extract(epoch from a.at)::double precision, a.actor, a.role, a.action, a.subject, a.reason, a.fence, a.detail,
           a.outcome, extract(epoch from a.ended_at)::double precision
      from holdfast.audit a
     where (only_action is null or a.action = only_action) and (only_actor is null or a.actor = only_actor)
     order by a.id desc limit max_rows;
end $$;

-- The members of one set of shards, and the holder of each shard, without reading the other leases.
create function holdfast.shard_list(shards text)
returns table (name text, holder text, remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query select l.name, l.holder, extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where (starts_with(l.name, shards || '/shard/') or starts_with(l.name, shards || '/member/'))
       and not b.dead and b.expires_at > clock_timestamp();
end $$;

revoke all on function holdfast.shard_list(text), holdfast.slot_rows(text),
                       holdfast.slot_claim(text, integer, text, double precision, uuid, uuid, boolean, jsonb), holdfast.slot_list(text),
                       holdfast.slot_abandon(text, uuid, boolean), holdfast.lease_wipe(text, uuid, jsonb),
                       holdfast.lease_force_release_if(text, bigint, text, text), holdfast.audit_note(bigint, bigint, jsonb),
                       holdfast.lease_recall(text, bigint), holdfast.beat_wanted(uuid), holdfast.lease_clear(text),
                       holdfast.audit_list(integer, text, text) from public;

insert into holdfast.schema_version (version, name) values (5, 'recipes');
