-- What the recipes over the lease need in one transaction: any free slot of a pool, a wipe under a guard, a lease taken
-- away only while it is still the one that was looked at; and the audit, which learns of fences.

alter table holdfast.audit add column fence bigint;
comment on column holdfast.audit.fence is 'of the lease under which it was done';

alter table holdfast.beat add column wanted uuid[];
comment on column holdfast.beat.wanted is 'tokens of those of its leases that an operator asks back';

-- For the slots of one pool, however many leases there are.
create index lease_slot on holdfast.lease (name text_pattern_ops) where name like '@slot:%';

-- The waiters of a pool wait for any of its slots, so a slot that is released is told under the pool's name.
create or replace function holdfast.wake(name text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    told text := case when name like '@slot:%' then regexp_replace(name, ':[0-9]+$', '') else name end;
begin
    if not pg_try_advisory_xact_lock(hashtext('holdfast.free'), hashtext(told)) then
        perform pg_notify('holdfast.free', told);
    end if;
end $$;

-- Claim any free slot, one of the leases '<pool>:1' to '<pool>:<capacity>'. The number bounds how many there can be; only
-- after the capacity shrank, while higher ones are still held, must they be counted, and by one claim at a time.
-- status, and the rest, as in lease_acquire; a refused claim writes nothing.
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

-- Living or not. The operators are those of the index: no collation has a say in what begins with what.
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
    return query select l.name, substr(l.name, length(pool) + 2)::integer, l.holder, l.fence, extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.slot_rows(pool) l join holdfast.beat b on b.id = l.beat
     where not b.dead and b.expires_at > clock_timestamp() order by 2;
end $$;

-- Give back a claim whose answer nobody heard: which slot it got is not known.
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

-- Delete every lease but the guard's and those in ``keep``; null, and nothing changed, when the token does not hold the
-- guard. The lock on its row keeps it from passing on until this is committed. The others are locked (55P03 when a
-- transaction that one protects does not let go) before the first is ended: a renewal holds its lease while it waits for
-- the beat, which an end writes. All in one statement, and all are told, whether somebody waits or not: of tens of thousands
-- each would have a place in the server's lock table until the commit, and write the same beat anew.
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
        select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, clock_timestamp(), 'forced', by_holder, 'wiped under guard ' || quote_literal(guard)
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

-- As lease_force_release, but only while it is the grant that was looked at.
create function holdfast.lease_force_release_if(name text, fence bigint, actor text, reason text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform from holdfast.lease l where l.name = lease_force_release_if.name and l.fence = lease_force_release_if.fence for update nowait;
    return found and holdfast.lease_force_release(name, actor, reason, false);
end $$;

-- Ask whoever has it to give it back, when the work under it has stopped: it learns of it with its next heartbeat. Nothing
-- is taken away, and the lease's row is left alone: a write to it would refuse the transactions that it protects.
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

-- A lease whose time is over is nobody's, and its row goes when somebody purges; here, when somebody comes upon it.
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

-- What has become known since it began, before its end.
create function holdfast.audit_note(entry bigint, fence bigint, detail jsonb) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.audit a set fence = coalesce(audit_note.fence, a.fence), detail = coalesce(audit_note.detail, a.detail)
     where a.id = entry and a.outcome is null and a.role = session_user;
    return found;
end $$;

create function holdfast.audit_list(most integer default 100)
returns table (id bigint, at double precision, actor text, role text, action text, subject text, reason text, fence bigint, detail jsonb,
               outcome text, ended_at double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select a.id, extract(epoch from a.at)::double precision, a.actor, a.role, a.action, a.subject, a.reason, a.fence, a.detail,
           a.outcome, extract(epoch from a.ended_at)::double precision
      from holdfast.audit a order by a.id desc limit most;
end $$;

-- Who is there, and who has which shard, of one set of shards, however many leases there are.
create function holdfast.shard_list(shards text)
returns table (name text, holder text, remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query select l.name, l.holder, extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where (starts_with(l.name, shards || '/shard/') or starts_with(l.name, shards || '/member/'))
       and not b.dead and b.expires_at > clock_timestamp();
end $$;

revoke all on function holdfast.shard_list(text), holdfast.slot_rows(text), holdfast.slot_claim(text, integer, text, double precision, uuid, uuid, boolean, jsonb), holdfast.slot_list(text),
                       holdfast.slot_abandon(text, uuid, boolean), holdfast.lease_wipe(text, uuid, jsonb),
                       holdfast.lease_force_release_if(text, bigint, text, text), holdfast.audit_note(bigint, bigint, jsonb),
                       holdfast.lease_recall(text, bigint), holdfast.beat_wanted(uuid), holdfast.lease_clear(text),
                       holdfast.audit_list(integer) from public;

insert into holdfast.schema_version (version, name) values (5, 'recipes');
