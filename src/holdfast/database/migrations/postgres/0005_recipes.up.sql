-- Functions for the recipes on leases that must be one transaction: claim any free slot of a pool, wipe under a guard,
-- force-release only the grant that the operator saw.

alter table holdfast.beat add column wanted bigint[];
comment on column holdfast.beat.wanted is 'fences of leases that an operator has recalled';

-- Finds the slots of one pool without reading all leases.
create index lease_slot on holdfast.lease (name text_pattern_ops) where name like '@slot:%';

-- A waiter waits for any slot of its pool, under the pool's name.
create or replace function holdfast.waiters_name(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return case when name like '@slot:%' then regexp_replace(name, ':[0-9]+$', '') else name end;
end $$;

-- The lease of a guard. Arguments and answers of these three are those of lease_acquire; there is no re-entry.
create function holdfast.guard_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    at_least_seconds double precision default 0, solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_take('guard', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
end $$;

-- The lease of an elector.
create function holdfast.elector_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    at_least_seconds double precision default 0, solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_take('elector', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
end $$;

-- For operators: the lease behind a gate, '@gate:…', and the one that governed commands run inside, 'holdfast:runtime'. A window outlives
-- its transaction, so a gate needs an entry of the audit that is under way and committed: audit_begin('gate.window', name of the gate,
-- actor, reason). Afterwards: audit_end(entry, outcome).
create function holdfast.gate_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    at_least_seconds double precision default 0, solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if starts_with(name, '@gate:') and not exists (
        select from holdfast.audit a where a.subject = substr(name, 7) and a.outcome is null and a.role = session_user
           and a.begun_in is distinct from pg_current_xact_id_if_assigned()) then
        raise exception 'gate %: first begin an audit entry with the name of the gate as its subject, and commit it', quote_literal(substr(name, 7))
            using errcode = 'insufficient_privilege', hint = 'gate_open writes its own entry.';
    end if;
    return holdfast.lease_take('gate', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
end $$;

-- The name of the lease behind a gate, or of a pool's slots: a prefix of ours before the name that the caller knows.
create function holdfast.own_name(prefix text, what text, name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.check_name(what, name);
    if length(name) > 180 then
        raise exception '% must have 1 to 180 characters, not %', what, length(name) using errcode = 'invalid_parameter_value';
    end if;
    return prefix || name;
end $$;

-- For operators: open a gate for a time, by a lease that is not renewed. The answer is that of lease_acquire, without a token: only
-- gate_close closes it before the time is over. The token recognises a request that is repeated. process: what listings show of the
-- program that asks. The audit has an entry for a gate that is opened, and for one that is held already.
create function holdfast.gate_open(
    name text, seconds double precision, actor text, reason text, token uuid default null, process jsonb default null,
    out status text, out fence bigint, out held_by text, out remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    lease_name text := holdfast.own_name('@gate:', 'name', name);
    repeated boolean := exists (select from holdfast.lease l where l.name = lease_name and l.token = sha256(uuid_send(gate_open.token)));
begin
    perform holdfast.audit_check(actor, reason);
    if seconds is null or seconds not between 1 and 86400 then
        raise exception 'seconds must be between 1 and 86400, not %', coalesce(seconds::text, 'NULL') using errcode = 'invalid_parameter_value';
    end if;
    select a.status, a.fence, a.held_by, a.remaining into status, fence, held_by, remaining
      from holdfast.lease_take('gate', lease_name, actor, seconds, gate_open.token, null, null, 0, true, null,
           coalesce(process, '{}') || jsonb_build_object('info', jsonb_build_object('for', seconds, 'reason', left(reason, 500)))) a;
    if fence is not null and not repeated then
        perform holdfast.audit_act('gate_open', name, actor, reason, fence, jsonb_build_object('for', seconds));
    elsif status = 'held' then
        perform holdfast.audit_act('gate_open', name, actor, reason, null, jsonb_build_object('for', seconds), 'refused: it is held by ' || left(held_by, 180));
    end if;
end $$;

-- For operators: close a gate that was opened for a time. Answers closed | not_open | window: only the block that opened a window
-- closes it. The audit has an entry for each answer. Waits at most 5 s for transactions that have passed gate_require; with
-- wait => false it fails with 55P03 at once.
create function holdfast.gate_close(name text, actor text, reason text, wait boolean default true) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    lease_name text := holdfast.own_name('@gate:', 'name', name);
    opened record;
    l holdfast.lease;
begin
    perform holdfast.audit_check(actor, reason);
    select x.token, x.fence, x.holder, b.info -> 'for' is null as is_window into opened from holdfast.lease x join holdfast.beat b on b.id = x.beat
     where x.name = lease_name and not b.dead and b.expires_at > clock_timestamp();
    if found and opened.is_window then
        perform holdfast.audit_act('gate_close', name, actor, reason, opened.fence, null, 'refused: a window of ' || left(opened.holder, 180));
        return 'window';
    elsif found then
        if wait then
            perform holdfast.lease_await(lease_name, opened.token);
        end if;
        select * into l from holdfast.lease x where x.name = lease_name and x.fence = opened.fence for update nowait;
    end if;
    if l.name is null then
        perform holdfast.audit_act('gate_close', name, actor, reason, null, null, 'refused: it is not open');
        return 'not_open';
    end if;
    perform holdfast.lease_end(l, 'forced', true, actor, reason);
    perform holdfast.audit_act('gate_close', name, actor, reason, l.fence, jsonb_build_object('holder', l.holder));
    return 'closed';
end $$;

-- The fence of an open gate; HF004 if it is closed. The lock on the lease row keeps the gate from being closed until the transaction
-- ends. The check of expiry is that of lease_protect.
create function holdfast.gate_require(name text) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    lease_name text := holdfast.own_name('@gate:', 'name', name);
    as_of timestamptz := holdfast.snapshot_time();
    f bigint;
begin
    if current_setting('transaction_read_only')::boolean then  -- and locks no row
        select l.fence into f from holdfast.lease l join holdfast.beat b on b.id = l.beat
         where l.name = lease_name and not b.dead and b.expires_at > as_of;
    else
        select l.fence into f from holdfast.lease l join holdfast.beat b on b.id = l.beat
         where l.name = lease_name and not b.dead and b.expires_at > as_of for share of l;
    end if;
    if f is null then
        raise exception 'gate % is closed', quote_literal(name)
            using errcode = 'HF004', hint = 'An operator opens it with gate_open.';
    end if;
    perform pg_try_advisory_xact_lock_shared(holdfast.protect_key(lease_name));  -- for listings, as in lease_protect
    return f;
end $$;

-- The same as a trigger on a table of the user: create trigger … execute function gate_trigger('name').
create function holdfast.gate_trigger() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_nargs <> 1 then
        raise exception 'trigger % must give the name of the gate: execute function gate_trigger(''name'')', quote_literal(tg_name)
            using errcode = 'invalid_parameter_value';
    end if;
    perform holdfast.gate_require(tg_argv[0]);
    if tg_op = 'DELETE' then
        return old;
    end if;
    return new;
end $$;

-- Claim any free slot, that is, one of the leases '<pool>:1' to '<pool>:<capacity>'. The numbers bound how many claims there
-- are. Only while a higher number is still held, after the capacity was reduced, must claims be counted, one claim at a time.
-- status and the other columns are those of lease_take; a refused claim writes nothing.
create function holdfast.slot_claim(
    pool text, capacity integer, holder text, ttl_seconds double precision,
    inout token uuid default null, inout beat uuid default null, solo boolean default true, process jsonb default null,
    out name text, out slot integer, out status text, out fence bigint, out held_by text, out remaining double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    prefix text := holdfast.own_name('@slot:', 'pool', pool);
    want uuid := coalesce(slot_claim.token, gen_random_uuid());
    want_hash bytea := sha256(uuid_send(want));
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
    select s.name into name from holdfast.slot_rows(prefix) s where s.token = want_hash;
    if not found then
        for attempt in 1..2 loop
            select count(*), coalesce(bool_or(s.slot > capacity), false), min(s.remaining), min(s.holder) into held, over, remaining, held_by
              from holdfast.slot_list(pool) s;
            if held >= capacity then
                status := 'held';
                return;
            end if;
            exit when not over or attempt = 2;
            if not pg_try_advisory_xact_lock(hashtext('holdfast.take'), hashtext(prefix)) then
                status := 'busy'; remaining := null;
                return;
            end if;
        end loop;
    end if;
    for r in select prefix || ':' || n as slot, n from generate_series(1, capacity) n
              where name is null and not exists (select from holdfast.slot_list(pool) s where s.slot = n)
              union all select name, 0 where name is not null order by 2 loop
        select * into a from holdfast.lease_take('slot', r.slot, slot_claim.holder, ttl_seconds, want, with_beat, null, 0, solo, null, process);
        if a.fence is not null or a.status = 'beat_lost' then
            name := r.slot; slot := substr(r.slot, length(prefix) + 2)::integer; status := a.status; token := a.token; beat := a.beat; fence := a.fence; held_by := a.held_by; remaining := a.remaining;
            return;
        end if;
    end loop;
    status := 'busy'; name := null; remaining := null; held_by := null;
end $$;

-- Slot leases of a pool, live or expired. Here and in slot_abandon the pool is named with its prefix. The index has these operators: the prefix match is independent of the collation.
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
declare
    prefix text := holdfast.own_name('@slot:', 'pool', pool);
begin
    return query select l.name, substr(l.name, length(prefix) + 2)::integer, l.holder, l.fence,
           extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.slot_rows(prefix) l join holdfast.beat b on b.id = l.beat
     where not b.dead and b.expires_at > clock_timestamp() order by 2;
end $$;

-- lease_renew and lease_release of a slot.
create function holdfast.slot_renew(pool text, slot integer, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_renew(holdfast.own_name('@slot:', 'pool', pool) || ':' || slot, token);
end $$;

create function holdfast.slot_release(pool text, slot integer, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_release(holdfast.own_name('@slot:', 'pool', pool) || ':' || slot, null, token);
end $$;

-- Undo a claim whose reply was lost: the caller does not know its slot.
create function holdfast.slot_abandon(pool text, token uuid, with_beat boolean) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    found_name text;
    token_hash bytea := sha256(uuid_send(token));
begin
    select s.name into found_name from holdfast.slot_rows(pool) s where s.token = token_hash;
    if not found then
        return false;
    end if;
    return case when with_beat then holdfast.lease_abandon(found_name, token) else holdfast.lease_release(found_name, null, token, false, false) end;
end $$;

-- Delete every lease whose name begins with ``prefix``, but no guard, elector or gate. Returns null and changes nothing unless the
-- token holds the lease "guard", which must be that of a guard (22023); the lock on its row prevents a takeover until the commit. All other leases are locked before the first one ends
-- (55P03 if a protected transaction does not finish), because a renewal holds its lease while it waits for the beat, which
-- the end of a lease writes. One statement ends them all and notifies for every name, whether there are waiters or not:
-- calling wake() and lease_end() for tens of thousands of leases would fill the server's lock table and rewrite the same beat.
create function holdfast.lease_wipe(guard text, token uuid, prefix text default '') returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '1s' as $$
declare
    by_holder text;
    by_fence bigint;
    by_kind text;
    ended int;
begin
    select x.holder, x.fence, x.kind into by_holder, by_fence, by_kind from holdfast.lease x join holdfast.beat b on b.id = x.beat
     where x.name = guard and x.token = sha256(uuid_send(lease_wipe.token)) and not b.dead and b.expires_at > clock_timestamp() for share of x;
    if not found then
        return null;
    elsif by_kind <> 'guard' then
        raise exception 'lease % is not the lease of a guard: nothing is wiped', quote_literal(guard) using errcode = 'invalid_parameter_value';
    end if;
    perform from holdfast.lease x
      where starts_with(x.name, prefix) and x.kind not in ('guard', 'elector', 'gate') order by x.name for update;
    with l as materialized (
        select * from holdfast.lease x
         where starts_with(x.name, prefix) and x.kind not in ('guard', 'elector', 'gate') order by x.name for update skip locked
    ), past as (
        insert into holdfast.history (name, holder, role, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
        select l.name, l.holder, l.role, b.host, b.pid, l.fence, l.acquired_at, clock_timestamp(), 'forced', by_holder,
               'wiped under guard ' || quote_literal(guard)
          from l left join holdfast.beat b on b.id = l.beat order by l.name
    ), told as (
        update holdfast.beat b set generation = b.generation + 1 where not b.solo and b.id in (select l.beat from l)
    ), alone as (
        delete from holdfast.beat b where b.solo and b.id in (select l.beat from l)
    ), gone as (
        delete from holdfast.lease x using l where x.name = l.name
    )
    select count(pg_notify('holdfast.free', holdfast.wake_payload(holdfast.waiters_name(l.name))))
      into ended from l;
    perform holdfast.audit_act('lease_wipe', guard, by_holder, 'wiped under guard ' || quote_literal(guard), by_fence,
                               jsonb_build_object('ended', ended, 'prefix', prefix));
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
create function holdfast.lease_recall(name text, fence bigint, actor text, reason text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    by_holder text;
begin
    update holdfast.beat b set generation = b.generation + 1, wanted = array_append(array_remove(b.wanted, l.fence), l.fence)
      from holdfast.lease l where l.name = lease_recall.name and l.fence = lease_recall.fence and b.id = l.beat
       and not b.dead and b.expires_at > clock_timestamp() returning l.holder into by_holder;
    if not found then
        return false;
    end if;
    perform holdfast.audit_act('lease_recall', name, actor, reason, fence, jsonb_build_object('holder', by_holder));
    return true;
end $$;

create function holdfast.beat_wanted(beat uuid) returns table (fence bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select unnest(b.wanted) from holdfast.beat b where b.id = sha256(uuid_send(beat_wanted.beat));
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

create function holdfast.audit_list(max_rows integer default 100, only_action text default null, only_actor text default null,
    max_bytes bigint default null)
returns table (id bigint, at double precision, actor text, role text, action text, subject text, reason text, fence bigint, detail jsonb,
               outcome text, ended_at double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select a.id, extract(epoch from a.at)::double precision, a.actor, a.role, a.action, a.subject, a.reason, a.fence, a.detail,
           a.outcome, extract(epoch from a.ended_at)::double precision
      from (
        select page.*, row_number() over steps as place, sum(page.bytes) over steps as bytes_so_far
          from (
            select x.*, octet_length(concat(x.actor, x.action, x.subject, x.reason, x.detail, x.outcome)) as bytes from holdfast.audit x
             where (only_action is null or x.action = only_action) and (only_actor is null or x.actor = only_actor)
             order by x.id desc limit max_rows) page
        window steps as (order by page.id desc)) a
     where audit_list.max_bytes is null or a.place = 1 or a.bytes_so_far <= audit_list.max_bytes
     order by a.id desc;
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

-- Where a process listens, and a key that proves to it that a request comes from a process of the same role: the replicas of the gateway.
-- A row is valid while its lease is held under that fence.
create table holdfast.peer (
    name    text collate "C" primary key,
    fence   bigint not null,
    role    text not null,
    address text not null,
    key     text not null
);
comment on column holdfast.peer.role is 'the database role of the session that wrote it, and the only one that reads it';

-- Store where the holder of a lease listens. False when the token does not hold it. Rows of other leases that have ended are deleted.
create function holdfast.peer_announce(name text, token uuid, address text, key text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform holdfast.check_name('address', address);
    perform holdfast.check_name('key', key);
    delete from holdfast.peer p
     where p.name in (select e.name from holdfast.peer e
                       where not exists (select from holdfast.lease l where l.name = e.name and l.fence = e.fence) for update of e skip locked);
    insert into holdfast.peer (name, fence, role, address, key)
    select l.name, l.fence, session_user, peer_announce.address, peer_announce.key
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = peer_announce.name and l.token = sha256(uuid_send(peer_announce.token)) and not b.dead and b.expires_at > clock_timestamp()
        on conflict (name) do update set fence = excluded.fence, role = excluded.role, address = excluded.address, key = excluded.key;
    return found;
end $$;

-- Where the holder of a lease listens, if the caller's role has stored it and the lease is held.
create function holdfast.peer_find(name text) returns table (address text, key text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select p.address, p.key
      from holdfast.peer p join holdfast.lease l on l.name = p.name and l.fence = p.fence join holdfast.beat b on b.id = l.beat
     where p.name = peer_find.name and p.role = session_user and not b.dead and b.expires_at > clock_timestamp();
end $$;

revoke all on function holdfast.peer_announce(text, uuid, text, text), holdfast.peer_find(text) from public;
revoke all on function holdfast.guard_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
                       holdfast.elector_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
                       holdfast.gate_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
                       holdfast.own_name(text, text, text), holdfast.gate_open(text, double precision, text, text, uuid, jsonb),
                       holdfast.gate_close(text, text, text, boolean), holdfast.gate_require(text), holdfast.gate_trigger(),
                       holdfast.slot_renew(text, integer, uuid), holdfast.slot_release(text, integer, uuid),
                       holdfast.shard_list(text), holdfast.slot_rows(text),
                       holdfast.slot_claim(text, integer, text, double precision, uuid, uuid, boolean, jsonb), holdfast.slot_list(text),
                       holdfast.slot_abandon(text, uuid, boolean), holdfast.lease_wipe(text, uuid, text),
                       holdfast.lease_force_release_if(text, bigint, text, text), holdfast.audit_note(bigint, bigint, jsonb),
                       holdfast.lease_recall(text, bigint, text, text), holdfast.beat_wanted(uuid), holdfast.lease_clear(text),
                       holdfast.audit_list(integer, text, text, bigint) from public;

insert into holdfast.schema_version (version, name) values (5, 'recipes');
