-- The durable lease: one heartbeat row per process and TTL, leases that point at it, fences that only rise, and a
-- check that makes the database itself refuse a superseded holder.
--
-- Lock rules that every function here follows:
--   * an acquire waits for no transaction: it uses SKIP LOCKED on lease and beat, and a try-lock before the INSERT of a free name. If it
--     gets no lock, it returns "busy" and the caller retries soon. It may wait for a session that raises the numbers (see
--     raise_number), which takes microseconds and waits for nothing;
--   * a function that waits for both rows locks the lease before the beat (renew, release, force_release); a takeover locks
--     the beat first, but with SKIP LOCKED;
--   * a heartbeat writes only the beat row, a protected transaction locks only the lease row: they never block each other;
--   * several calls of one client may share a transaction (statement "share" of postgres.sql). Such a transaction takes its names
--     in order and waits for a lock for at most 200 ms; what would have to wait longer is rolled back with its neighbours and sent
--     again alone. So no two of them deadlock, and none waits for a user's transaction: acquires try, releases use NOWAIT, and
--     what remains are rows of a beat, which another of these transactions or a heartbeat frees in a moment. What may wait for
--     seconds sets a lock_timeout of its own (renew, force_release), which would override that limit: it is sent alone;
--   * no object is written in a transaction with leases: it may be locked by a user, and the heartbeat of another process may wait
--     for a beat that the transaction has locked (one that was re-entered, taken over, or released with "tell"). Its wait has a
--     bound: 64 statements of about 0.1 ms, and one commit.
-- Tables have the hashes of secrets, sha256(uuid_send(…)) of the token of a lease and of the id by which a process renews its beat; the
-- fence of a lease is no secret. Functions get secrets, hash and compare them, and return none that they have not just drawn or been given.
-- Every function pins its search_path, because a SECURITY DEFINER function without one can be hijacked. Internal functions
-- are not SECURITY DEFINER: a role without privileges on the tables cannot call them directly.

-- Not "create schema if not exists": it requires the CREATE privilege even if the schema exists.
do $$ begin
    if not exists (select from pg_catalog.pg_namespace where nspname = 'holdfast') then
        create schema holdfast;
    end if;
end $$;

create table holdfast.schema_version (
    version    int primary key,
    name       text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- Numbers that only rise: fences, versions of objects, places in the log of operations. They count microseconds since 2026, so that a
-- number drawn after any restore is higher than all numbers that the restore has lost: see holdfast.draw.
-- CACHE stays 1: with cached values, a later draw in another session could get a lower number.
create sequence holdfast.fence as bigint no cycle cache 1;
create sequence holdfast.version as bigint no cycle cache 1;
create sequence holdfast.place as bigint no cycle cache 1;
-- The server_life() for which the three were raised. A sequence, because every session sees setval at once and no rollback undoes it.
create sequence holdfast.raised_for as bigint minvalue -9223372036854775808 no cycle cache 1;

-- Never updated: the xmin of its row tells a restored dump from the data that was dumped.
create table holdfast.meta (
    one        boolean primary key default true check (one),
    our_schema boolean not null
);
comment on column holdfast.meta.our_schema is 'the migration created the schema and drops it last; false for an existing schema and for "public"';

-- Every heartbeat updates a row in place: the low fillfactor allows HOT updates, and vacuum runs early.
create table holdfast.beat (
    id             bytea primary key,
    ttl            interval not null check (ttl between interval '50 ms' and interval '1 day'),
    expires_at     timestamptz not null,
    dead           boolean not null default false,
    generation     bigint not null default 0,
    solo           boolean not null,
    session_key    bigint,
    server_started timestamptz,
    unseen_at      timestamptz,
    label          text not null,
    host           text,
    pid            int,
    started        timestamptz not null default clock_timestamp() check (started between '2000-01-01' and '9000-01-01'),
    info           jsonb check (pg_column_size(info) <= 4096 and length(info::text) <= 4300 and jsonb_typeof(info) = 'object'),
    check (octet_length(host) <= 1000)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on column holdfast.beat.id is 'hash of the secret with which its process renews and ends it';
comment on column holdfast.beat.info is 'shown to everybody who lists leases; no number in it is too long for Python, which refuses more than 4300 digits';
comment on column holdfast.beat.solo is 'serves one lease, and is deleted with it';
comment on column holdfast.beat.generation is 'rises when one of its leases is taken away before it expires; the next heartbeat reads it';
comment on column holdfast.beat.session_key is 'advisory key that the session holds: if it is free, the session has ended (failover = session). An owner key, 7846 in its first 16 bits, is taken again after a reconnect: see beat_look';
comment on column holdfast.beat.unseen_at is 'when the owner key was found free; null again when it is locked or found locked, and with the next heartbeat';

-- No foreign key to beat: it would create a multixact in every acquire. A missing beat counts as dead.
create table holdfast.lease (
    name        text collate "C" primary key,
    holder      text not null,
    beat        bytea not null,
    token       bytea not null,
    fence       bigint not null,
    acquired_at timestamptz not null,
    keep_until  timestamptz,
    kept        boolean not null default false,
    kind        text not null,
    role        text not null,
    reenter     bytea
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

comment on column holdfast.lease.token is 'hash of the token that was given to the holder';
comment on column holdfast.lease.kind is 'which function took it: plain, guard, elector, gate, slot, operation or relay';
comment on column holdfast.lease.role is 'the database role that took it';
comment on column holdfast.lease.reenter is 'hash of the secret with which the same holder and role re-enter; null: there is no re-entry';
comment on column holdfast.lease.kept is 'released before keep_until: no holder until its beat ends; history already has the release';

create table holdfast.history (
    id          bigint generated always as identity primary key,
    name        text not null,
    holder      text not null,
    role        text,
    host        text,
    pid         int,
    fence       bigint not null,
    acquired_at timestamptz not null,
    ended_at    timestamptz not null,
    outcome     text not null check (outcome in ('released', 'expired', 'session_lost', 'reentered', 'forced')),
    actor       text,
    reason      text
);

-- Keep the newest 10,000 rows on insert: perhaps no process ever calls purge(). SKIP LOCKED, so that it never waits. Not under
-- repeatable read or serializable: the DELETE could fail with a serialization error and abort the caller's transaction.
create function holdfast.history_trim() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('transaction_isolation') = 'read committed' then
        delete from holdfast.history h where h.id in (select x.id from holdfast.history x where x.id <= new.id - 10000 for update skip locked);
    end if;
    return null;
end $$;
create trigger history_trim after insert on holdfast.history for each row when (new.id % 100 = 0) execute function holdfast.history_trim();

create unlogged table holdfast.commit_check (
    name  text not null,
    token bytea not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- The schema is ours if this transaction created it.
insert into holdfast.meta (our_schema)
select n.xmin = pg_current_xact_id()::xid and n.nspname <> 'public' from pg_catalog.pg_namespace n where n.nspname = 'holdfast';

-- Identifies this copy of the data. A restored dump has another, because the row of meta has another xmin; a copied database, because
-- the path of a file contains the database's oid. A restart, a failover and a physical backup keep it.
create function holdfast.copy_id() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return coalesce((select hash_record_extended(row(pg_relation_filepath('holdfast.raised_for'), m.xmin), 0) from holdfast.meta m), 0);
end $$;

-- Identifies this copy of the data and the start of the server. Every restore changes it: a physical one needs a start.
create function holdfast.server_life() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return (select hash_record_extended(row(pg_postmaster_start_time(), pg_relation_filepath('holdfast.raised_for'), m.xmin), 0)
              from holdfast.meta m);
end $$;

create function holdfast.clock_number() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return (date_part('epoch', clock_timestamp()) - 1767225600) * 1000000;
end $$;

-- Set each sequence that is below "below" to the target, or to 60 s above its last number where that is not far enough.
--   * The caller has the lock. While raised_for is not this life, no other session draws: so it is cleared before the
--     sequences are read, and set last. However long this session is stopped in between, each of the others draws at most what
--     its statement draws after one check, all together less than 10,000 numbers. So setval never lowers a sequence.
--   * No rollback undoes setval. After an error in here, the next draw begins as in a new life.
create function holdfast.set_numbers(life bigint, below bigint, target bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    perform setval('holdfast.raised_for', 0);
    perform setval(s.name, case when s.last < target - 10000 then target else s.last + 60000000 end)
       from (select 'holdfast.fence'::regclass as name, f.last_value as last from holdfast.fence f
             union all select 'holdfast.version', v.last_value from holdfast.version v
             union all select 'holdfast.place', p.last_value from holdfast.place p) s
      where s.last < below;
    perform setval('holdfast.raised_for', life);
end $$;

-- Raise the sequences before the first draw of a server life, or those that are a second behind the clock; then draw.
--   * A number was at most 60 s ahead of the clock when it was drawn, and only because the sequences were raised by 60 s then. Every
--     later raise is higher, whatever it restored, unless its clock is behind. Where the clock was set back, 60 s above the
--     restored number are more than can have been drawn since.
--   * The lock is released by rolling back the subtransaction: at once, although the caller's transaction goes on, and also after an
--     error or a cancellation.
create function holdfast.raise_number(counter regclass) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    life bigint;
    clock bigint;
    n bigint;
begin
    begin
        perform pg_advisory_xact_lock(hashtext('holdfast.raise'), 0);
        life := holdfast.server_life();
        clock := holdfast.clock_number();
        if (select r.last_value from holdfast.raised_for r) is distinct from life then
            perform holdfast.set_numbers(life, 9223372036854775807, clock + 60000000);
        elsif coalesce(pg_sequence_last_value(counter), 0) < clock - 1000000 then
            perform holdfast.set_numbers(life, clock - 1000000, clock);
        end if;
        n := nextval(counter);
        raise exception 'release the lock' using errcode = 'HF000';
    exception when sqlstate 'HF000' then
        null;
    end;
    return n;
end $$;

-- The next number of a sequence. It is drawn after the check of raised_for: a number that was drawn before a raise by another session
-- may be one that a restore has lost.
-- Never with synchronous_commit = off, even if the role or database sets it: after a crash the same number would be issued again.
create function holdfast.draw(counter regclass) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    n bigint;
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    -- hot: server_life() and clock_number(), inlined
    if (select r.last_value = hash_record_extended(row(pg_postmaster_start_time(), pg_relation_filepath('holdfast.raised_for'), m.xmin), 0)
          from holdfast.meta m, holdfast.raised_for r) then
        n := nextval(counter);
        if n >= (date_part('epoch', clock_timestamp()) - 1767225600) * 1000000 - 1000000 then
            return n;
        end if;
    end if;
    return holdfast.raise_number(counter);
end $$;

-- The space of cursors: they hold transaction ids, which mean nothing in another copy of the data.
create table holdfast.space (
    one  boolean primary key default true check (one),
    id   bigint not null,
    copy bigint not null
);
comment on column holdfast.space.copy is 'the copy_id() of this space; where it differs, a new space begins';

create function holdfast.random_space() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return hashtextextended(gen_random_uuid()::text, 0) & 288230376151711743;  -- at most 18 digits
end $$;

insert into holdfast.space (id, copy) values (holdfast.random_space(), holdfast.copy_id());

-- The current space. The first call in another copy of the data begins a new one; triggers on the update then adapt what holds
-- transaction ids. Other callers wait for its commit. 0 in a read-only transaction that would have to begin one.
create function holdfast.current_space() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    here bigint := holdfast.copy_id();
    space bigint;
begin
    select s.id into space from holdfast.space s where s.copy = here;
    if not found and current_setting('transaction_read_only') = 'on' then
        return 0;
    elsif not found then
        update holdfast.space s set id = holdfast.random_space(), copy = here where s.copy <> here;
        select s.id into space from holdfast.space s;
    end if;
    return space;
end $$;

-- For operators: raise fences, versions and places to 60 s ahead of the clock and, if it is given, above "above". Returns the highest. A
-- rollback does not undo it, so its entry in the audit must be committed before: audit_begin('fence.raise', 'fences', actor, reason).
-- Afterwards: audit_end(entry, outcome).
create function holdfast.fence_raise(above bigint, entry bigint) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    target bigint;
begin
    if above not between 0 and 1152921504606846975 then
        raise exception 'above must be between 0 and 2^60 - 1, not %', above using errcode = 'invalid_parameter_value';
    end if;
    if not holdfast.audit_stands(entry, 'fences') then
        raise exception 'first begin an audit entry with the subject ''fences'', and commit it' using errcode = 'insufficient_privilege';
    end if;
    perform holdfast.draw('holdfast.fence');
    begin
        perform pg_advisory_xact_lock(hashtext('holdfast.raise'), 0);
        target := greatest(holdfast.clock_number() + 60000000, above);
        perform holdfast.set_numbers(holdfast.server_life(), target, target);
        target := (select f.last_value from holdfast.fence f);
        raise exception 'release the lock' using errcode = 'HF000';
    exception when sqlstate 'HF000' then
        null;
    end;
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    return target;
end $$;

-- How many seconds each sequence is ahead of the clock. Up to 60 are normal after a start.
create function holdfast.fence_ahead() returns table (name text, seconds double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    clock bigint := holdfast.clock_number();
begin
    return query select s.name, (s.last - clock) / 1000000.0::double precision
      from (select 'fence' as name, f.last_value as last from holdfast.fence f
            union all select 'version', v.last_value from holdfast.version v
            union all select 'place', p.last_value from holdfast.place p) s;
end $$;

create function holdfast.check_name(what text, value text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if value is null or length(value) not between 1 and 200 or value ~ '[[:cntrl:]]' then
        raise exception '% must have 1 to 200 characters and no control characters, not %', what, coalesce(quote_literal(left(value, 60)), 'NULL')
            using errcode = 'invalid_parameter_value';
    end if;
end $$;

-- Leases whose names begin with gateway:, and objects whose types begin with @, are the gateway's: its driver runs what a sandbox's record
-- says, and records contain secrets. A role takes, reads and writes them if it may announce a replica. session_user: in functions the
-- current one is their owner.
create function holdfast.check_gateway(name text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    if not has_function_privilege(session_user, 'holdfast.peer_announce(text, uuid, text, text)', 'execute') then
        raise exception 'permission denied for %: leases ''gateway:…'' and objects of types ''@…'' are the gateway''s, for a role that may execute peer_announce',
            quote_literal(name) using errcode = 'insufficient_privilege';
    end if;
end $$;

-- Names that begin with @ or holdfast: are holdfast's own, and each belongs to one kind of lease. Anybody may take any other name as a
-- plain lease, for a guard or for an elector, except the gateway's.
create function holdfast.check_kind(kind text, name text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    if name like 'gateway:%' then
        perform holdfast.check_gateway(name);
    elsif kind in ('plain', 'guard', 'elector') and (name like '@%' or name like 'holdfast:%') then
        raise exception 'name must not begin with ''@'' or ''holdfast:'', which are reserved for holdfast''s own leases (gates, slots, operations, relays, the runtime lease): %',
            quote_literal(name) using errcode = 'invalid_parameter_value';
    elsif kind = 'gate' and name not like '@gate:%' and name <> 'holdfast:runtime' or kind = 'slot' and name not like '@slot:%'
          or kind = 'operation' and name not like '@op:%' or kind = 'relay' and name not like '@relay:%' then
        raise exception 'a lease of kind % cannot have the name %', kind, quote_literal(name) using errcode = 'invalid_parameter_value';
    end if;
end $$;

-- The name that the waiters of a lease wait for.
create function holdfast.waiters_name(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return name;
end $$;

-- A hash of the name: every role that may connect to the database may listen.
create function holdfast.wake_payload(awaited text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return left(encode(sha256(convert_to(awaited, 'UTF8')), 'hex'), 16);
end $$;

-- Notify the waiters of a lease, if there are any. A waiter holds a shared lock on the name's key in its listening session.
-- If we get the exclusive lock, there is no waiter, and none can start to wait before we commit. NOTIFY on every release
-- would halve the total throughput.
create function holdfast.wake(name text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    awaited text := holdfast.waiters_name(name);
begin
    if not pg_try_advisory_xact_lock(hashtext('holdfast.free'), hashtext(awaited)) then
        perform pg_notify('holdfast.free', holdfast.wake_payload(awaited));
    end if;
end $$;

-- Every end of a lease except a takeover or re-entry goes through here. The caller has locked the lease row.
create function holdfast.lease_end(l holdfast.lease, outcome text, tell boolean, actor text default null, reason text default null) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    b record;
    now timestamptz := clock_timestamp();
    stay bytea;
begin
    select * into b from holdfast.beat where id = l.beat;
    if not l.kept or outcome = 'forced' then
        insert into holdfast.history (name, holder, role, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
        values (l.name, l.holder, l.role, b.host, b.pid, l.fence, l.acquired_at,
                case when outcome = 'expired' then least(b.expires_at, now) else now end, outcome, actor, reason);
    end if;
    if outcome = 'released' and l.keep_until > now then
        stay := sha256(uuid_send(gen_random_uuid()));
        insert into holdfast.beat (id, ttl, expires_at, solo, label, host, pid, started)
        values (stay, greatest(l.keep_until - now, interval '50 ms'), l.keep_until, true, coalesce(b.label, l.holder), b.host, b.pid,
                coalesce(b.started, now));
        update holdfast.lease set beat = stay, token = sha256(uuid_send(gen_random_uuid())), keep_until = null, kept = true where lease.name = l.name;
    else
        delete from holdfast.lease where lease.name = l.name;
        perform holdfast.wake(l.name);
    end if;
    if b.solo then
        delete from holdfast.beat where id = l.beat;
    elsif tell then
        update holdfast.beat set generation = generation + 1 where id = l.beat;
    end if;
end $$;

-- The advisory key that a transaction holds, shared, while it protects a lease: the server does not show who holds a lock on a row.
create function holdfast.protect_key(name text) returns bigint
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return (7848::bigint << 48) | (hashtextextended(name, 0) & 281474976710655);
end $$;

-- Let the server end the session if its transaction is still open after this time, where it can: since PostgreSQL 17. A shorter limit of
-- its own stays. 0 would mean: no limit.
create function holdfast.limit_transaction(seconds double precision) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    own_ms bigint := extract(epoch from current_setting('transaction_timeout', true)::interval) * 1000;
begin
    if own_ms = 0 or own_ms > seconds * 1000 then
        perform set_config('transaction_timeout', (seconds * 1000)::bigint::text, true);
    end if;
end $$;

-- Look for the owner key of a beat. Null: its session lives, or the TTL alone decides. Else the seconds until the next look may declare
-- the beat dead: the key has to be found free twice, 0.5 s apart, without a heartbeat in between, and without a look that finds it held.
-- 0: this call has declared it dead.
-- The lock is given back at once, so that the owner can take it again. Through a pooler that is still one session.
create function holdfast.beat_look(beat bytea) returns double precision
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    b record;
    is_free boolean;
    seconds double precision;
begin
    select * into b from holdfast.beat x
     where x.id = beat_look.beat and x.session_key >> 48 = 7846 and not x.dead and x.expires_at > clock_timestamp()
       and x.server_started = pg_postmaster_start_time();
    if not found then
        return null;  -- where session locks are refused it ends here, because no beat has an owner key
    end if;
    is_free := pg_try_advisory_lock(b.session_key);
    if is_free then
        perform pg_advisory_unlock(b.session_key);
    elsif b.unseen_at is null then
        return null;
    end if;
    seconds := 0.5 - extract(epoch from clock_timestamp() - b.unseen_at);
    if is_free and seconds > 0 then
        return seconds;
    end if;
    -- Once more under the lock of the row, which owner_hold and a heartbeat need: the owner may have come back since.
    perform from holdfast.beat x where x.id = b.id and x.unseen_at is not distinct from b.unseen_at and not x.dead for no key update skip locked;
    if not found then
        return 0.01;
    elsif is_free and pg_try_advisory_lock(b.session_key) then
        perform pg_advisory_unlock(b.session_key);
        update holdfast.beat x set unseen_at = coalesce(x.unseen_at, clock_timestamp()), dead = seconds is not null where x.id = b.id;
        return case when seconds is null then 0.5 else 0 end;
    elsif exists (select from pg_locks k where k.locktype = 'advisory' and k.mode = 'ShareLock' and k.granted and k.objsubid = 1
                   and k.classid::bigint << 32 | k.objid::bigint = b.session_key
                   and k.database = (select d.oid from pg_database d where d.datname = current_database())) then
        update holdfast.beat x set unseen_at = null where x.id = b.id;
        return null;
    end if;
    return 0.01;  -- another look has the lock at this moment
end $$;

-- Lock an owner key, shared: a session of this process that the server has not given up yet may have it, too. The same statement
-- removes the note that it was free. If only the next heartbeat did, two short losses of the session could count as a long one. It
-- waits for a look that is under way, and so also removes the note of that one.
create function holdfast.owner_hold(key bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not pg_try_advisory_lock_shared(key) then
        return false;
    end if;
    update holdfast.beat b set unseen_at = null where b.session_key = key;
    return true;
end $$;

create type holdfast.lease_answer as (
    token uuid, beat uuid, status text, fence bigint, held_by text, remaining double precision, session_watch bigint
);

-- Acquire, take over or re-enter a lease of any kind. status: acquired | taken_over | reentered | held | busy (retry soon) | beat_lost.
-- Without a beat, it creates one for this lease alone, to be renewed with lease_renew(name, token). With a beat and a
-- process, it creates the beat of that process if it is missing. With a beat but no process, the beat must exist.
-- A refused acquire writes nothing. Only the functions of the kinds call it: lease_acquire, guard_acquire, elector_acquire, gate_acquire,
-- slot_claim, operation_acquire, operation_claim, relay_acquire.
create function holdfast.lease_take(
    kind text, name text, holder text, ttl_seconds double precision, inout token uuid, inout beat uuid,
    reenter text, at_least_seconds double precision, solo boolean, session_key bigint, process jsonb,
    out status text, out fence bigint, out held_by text, out remaining double precision, out session_watch bigint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    r record;
    taken boolean;
    gone boolean;
    look double precision;
    founds boolean;
    want uuid := coalesce(lease_take.token, gen_random_uuid());
    want_hash bytea := sha256(uuid_send(want));
    beat_secret uuid := coalesce(lease_take.beat, gen_random_uuid());
    beat_id bytea := sha256(uuid_send(beat_secret));
    proof bytea := sha256(convert_to(reenter, 'UTF8'));
    keep timestamptz;
    number bigint;
begin
    -- hot: bench lease pairs. The checks are repeated here, because a call of a function costs as much as each.
    if name is null or length(name) not between 1 and 200 or name ~ '[[:cntrl:]]' then
        perform holdfast.check_name('name', name);
    end if;
    if name like '@%' or name like 'holdfast:%' or name like 'gateway:%' or kind not in ('plain', 'guard', 'elector') then
        perform holdfast.check_kind(kind, name);
    end if;
    if holder is null or length(holder) not between 1 and 200 or holder ~ '[[:cntrl:]]' then
        perform holdfast.check_name('holder', holder);
    end if;
    if ttl_seconds is null or ttl_seconds not between 0.05 and 86400 then
        raise exception 'ttl_seconds must be between 0.05 and 86400, not %', ttl_seconds using errcode = 'invalid_parameter_value';
    end if;
    if at_least_seconds is null or at_least_seconds not between 0 and 86400 then
        raise exception 'at_least_seconds must be between 0 and 86400, not %', at_least_seconds using errcode = 'invalid_parameter_value';
    end if;
    lease_take.token := null;
    for attempt in 1..4 loop
        select l.*, b.id is null or b.dead as dead, coalesce(b.expires_at <= clock_timestamp(), true) as expired,
               b.expires_at, b.solo, b.host, b.pid, b.session_key, b.server_started, own.id is not null as own_exists,
               case when not own.dead then date_part('epoch', own.expires_at - clock_timestamp()) end as own_remaining
          into r
          from (values (lease_take.name)) asked (name) left join holdfast.lease l on l.name = asked.name
               left join holdfast.beat b on b.id = l.beat left join holdfast.beat own on own.id = beat_id;
        taken := r.name is not null;
        if taken and r.token = want_hash and not r.dead and not r.expired then
            -- A repeated request whose first reply was lost. The UPDATE makes this commit wait for a synchronous standby, too.
            update holdfast.lease l set holder = r.holder where l.name = r.name and l.token = want_hash;
            -- The beat of a process is its secret, as it opens all of its leases: the token of one does not.
            status := 'acquired'; token := want; beat := case when r.beat = beat_id then beat_secret end; fence := r.fence;
            remaining := extract(epoch from r.expires_at - clock_timestamp());
            return;
        end if;
        gone := false;
        look := null;
        if taken and not r.dead and not r.expired and r.session_key >> 48 = 7846 then
            look := holdfast.beat_look(r.beat);
            r.dead := coalesce(look = 0, false);
        elsif taken and not r.dead and not r.expired and r.session_key is not null and r.server_started = pg_postmaster_start_time() then
            gone := pg_try_advisory_xact_lock_shared(r.session_key);
        end if;
        if taken and not (r.dead or r.expired or gone) 
           and not coalesce(r.reenter = proof and r.holder = lease_take.holder and r.role = session_user and not r.kept, false) then
            status := 'held'; held_by := r.holder; 
            session_watch := case when r.session_key >> 48 <> 7846 then r.session_key end;
            remaining := least(extract(epoch from r.expires_at - clock_timestamp()), look); beat := null;
            return;
        end if;
        founds := lease_take.beat is null or not r.own_exists and process is not null;
        if lease_take.beat is not null then
            remaining := r.own_remaining;
            -- If the caller's own beat holds the lease and its session has ended, the beat is lost as well.
            if not founds and coalesce(remaining, 0) <= 0 or gone and r.beat = beat_id then
                status := 'beat_lost'; remaining := null;
                return;
            end if;
        end if;
        keep := clock_timestamp() + make_interval(secs => nullif(at_least_seconds, 0));
        if not taken then
            -- Another session may have inserted this name without committing yet: the INSERT would wait for it.
            exit when not pg_try_advisory_xact_lock(hashtext('holdfast.take'), hashtext(lease_take.name));
            if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
            number := nextval('holdfast.fence');
            -- hot: the check of draw(), inlined
            insert into holdfast.lease as l
            select lease_take.name, lease_take.holder, beat_id, want_hash, number, clock_timestamp(), keep, false, lease_take.kind, session_user, proof
              from holdfast.meta m, holdfast.raised_for f
             where number >= (date_part('epoch', clock_timestamp()) - 1767225600) * 1000000 - 1000000
               and f.last_value = hash_record_extended(row(pg_postmaster_start_time(), pg_relation_filepath('holdfast.raised_for'), m.xmin), 0)
                on conflict do nothing;
            if not found then
                number := holdfast.draw('holdfast.fence');
                insert into holdfast.lease as l values (lease_take.name, lease_take.holder, beat_id, want_hash, number, clock_timestamp(), keep, false, lease_take.kind,
                                                    session_user, proof)
                    on conflict do nothing;
                continue when not found;
            end if;
            -- The row is ours. If another fence was drawn since ours, its holder may have had and released this name: draw again.
            if pg_sequence_last_value('holdfast.fence'::regclass) <> number then
                number := holdfast.draw('holdfast.fence');
                update holdfast.lease l set fence = number where l.name = lease_take.name;
            end if;
            status := 'acquired';
        else
            if not r.dead and (r.expired or gone) then
                -- The first takeover marks the beat dead, so that a concurrent renewal either wins or is refused for ever.
                perform from holdfast.beat b
                  where b.id = r.beat and not b.dead and (gone or b.expires_at <= clock_timestamp()) for no key update skip locked;
                if not found then
                    status := 'busy';
                    continue;
                end if;
                update holdfast.beat b set dead = true where b.id = r.beat;
            end if;
            perform from holdfast.lease l where l.name = lease_take.name and l.token = r.token for no key update skip locked;
            if not found then
                status := 'busy';
                continue;
            end if;
            -- For listings alone: until the commit they show who takes this name, as they do where it is inserted.
            perform pg_try_advisory_xact_lock(hashtext('holdfast.take'), hashtext(lease_take.name));
            status := case when r.dead or r.expired or gone then 'taken_over' else 'reentered' end;
            number := holdfast.draw('holdfast.fence');
            update holdfast.lease l set holder = lease_take.holder, beat = beat_id, token = want_hash, fence = number,
                   acquired_at = clock_timestamp(), keep_until = keep, kept = false, kind = lease_take.kind,
                   role = session_user, reenter = proof
             where l.name = lease_take.name;
            if not r.kept then
                insert into holdfast.history (name, holder, role, host, pid, fence, acquired_at, ended_at, outcome)
                values (r.name, r.holder, r.role, r.host, r.pid, r.fence, r.acquired_at, least(coalesce(r.expires_at, clock_timestamp()), clock_timestamp()),
                        case when status = 'reentered' then 'reentered' when gone or look = 0 then 'session_lost' else 'expired' end);
            end if;
            if r.solo and r.beat <> beat_id then
                delete from holdfast.beat b where b.id = r.beat;
            elsif status = 'reentered' then
                update holdfast.beat b set generation = b.generation + 1 where b.id = r.beat;  -- notifies the previous grant of this holder
            end if;
            held_by := r.holder;
        end if;
        if founds then
            insert into holdfast.beat (id, ttl, expires_at, solo, session_key, server_started, label, host, pid, started, info)
            values (beat_id, make_interval(secs => ttl_seconds), clock_timestamp() + make_interval(secs => ttl_seconds), lease_take.solo,
                    lease_take.session_key, case when lease_take.session_key is not null then pg_postmaster_start_time() end,
                    coalesce(left(process ->> 'label', 200), lease_take.holder), process ->> 'host', (process ->> 'pid')::int,
                    coalesce(to_timestamp((process ->> 'started')::double precision), clock_timestamp()), process -> 'info') on conflict do nothing;
            remaining := ttl_seconds;
            if not found then  -- another session of the same process was first
                select case when b.dead then 0 else extract(epoch from b.expires_at - clock_timestamp()) end
                  into remaining from holdfast.beat b where b.id = beat_id;
            end if;
        end if;
        token := want; beat := beat_secret; fence := number;
        -- Committed later than its TTL it would be worth nothing. Not for a statement that is its own transaction.
        if statement_timestamp() <> transaction_timestamp() then
            perform holdfast.limit_transaction(greatest(ttl_seconds, 10));
        end if;
        return;
    end loop;
    status := 'busy'; beat := null; remaining := null;
end $$;

-- Acquire a plain lease. reenter: a secret. The same holder and database role that repeats it takes the lease over while it is held, with a
-- new token and a higher fence. Only its hash is stored.
create function holdfast.lease_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    reenter text default null, at_least_seconds double precision default 0,
    solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if length(reenter) not between 1 and 200 then
        raise exception 'reenter must have 1 to 200 characters' using errcode = 'invalid_parameter_value';
    end if;
    return holdfast.lease_take('plain', name, holder, ttl_seconds, token, beat, reenter, at_least_seconds, solo, session_key, process);
end $$;

-- True: the lease is held under this token, which the caller has drawn for this grant; a repeated request is answered the same. False:
-- another holder has it, or is taking it just now.
create function holdfast.lease_try(name text, holder text, token uuid, ttl_seconds double precision) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if token is null then
        raise exception 'token must not be NULL: draw one with gen_random_uuid()' using errcode = 'invalid_parameter_value';
    end if;
    return (select a.fence is not null
              from holdfast.lease_take('plain', lease_try.name, lease_try.holder, ttl_seconds, lease_try.token, null, null, 0, true, null, null) a);
end $$;

-- Renew the lease's beat. FOR SHARE re-checks the token on the locked row: a sub-select could return true to a replaced holder.
create function holdfast.lease_renew(name text, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    beat_id bytea;
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    select l.beat into beat_id from holdfast.lease l where l.name = lease_renew.name and l.token = sha256(uuid_send(lease_renew.token)) for share;
    update holdfast.beat b set expires_at = clock_timestamp() + b.ttl where b.id = beat_id and not b.dead and b.expires_at > clock_timestamp();
    return found;
end $$;

-- Whether the token still holds the lease. For grants whose beat this process does not renew.
create function holdfast.lease_status(name text, token uuid)
returns table (holder text, fence bigint, ttl double precision, remaining double precision)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.holder, l.fence, extract(epoch from b.ttl)::double precision,
           extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = lease_status.name and l.token = sha256(uuid_send(lease_status.token)) and not b.dead and b.expires_at > clock_timestamp();
end $$;

-- Lock the row of a lease, waiting at most 5 s for transactions that it protects.
create function holdfast.lease_await(name text, token_hash bytea) returns void
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
begin
    perform from holdfast.lease l where l.name = lease_await.name and l.token = token_hash for update;
end $$;

-- False for a foreign or stale token, and for another holder than that of the token, unless holder is null. Waits at most 5 s for
-- transactions that this lease protects; with wait => false it fails with 55P03 at once. tell: the process that renews the beat
-- learns of the release with its next heartbeat.
create function holdfast.lease_release(name text, holder text, token uuid, wait boolean default true, tell boolean default true) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    l holdfast.lease;
    r record;
    token_hash bytea := sha256(uuid_send(token));
begin
    if wait then
        perform holdfast.lease_await(name, token_hash);
    end if;
    select x.*, b.host, b.pid, b.solo into r from holdfast.lease x left join holdfast.beat b on b.id = x.beat
     where x.name = lease_release.name and x.token = token_hash and (lease_release.holder is null or x.holder = lease_release.holder)
       for update of x nowait;
    if not found then
        return false;
    end if;
    if tell or r.solo or r.kept or r.keep_until is not null then
        select * into l from holdfast.lease x where x.name = lease_release.name;
        perform holdfast.lease_end(l, 'released', tell);
        return true;
    end if;
    -- hot: lease_end() and wake(), inlined for the lease of a process
    insert into holdfast.history (name, holder, role, host, pid, fence, acquired_at, ended_at, outcome)
    values (r.name, r.holder, r.role, r.host, r.pid, r.fence, r.acquired_at, clock_timestamp(), 'released');
    delete from holdfast.lease x where x.name = r.name;
    if not pg_try_advisory_xact_lock(hashtext('holdfast.free'), hashtext(holdfast.waiters_name(r.name))) then
        perform holdfast.wake(r.name);
    end if;
    return true;
end $$;

-- Undo an acquire whose reply was lost, and the beat that it created. No work was done under the lease, so at_least does
-- not apply.
create function holdfast.lease_abandon(name text, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    l holdfast.lease;
begin
    select * into l from holdfast.lease x where x.name = lease_abandon.name and x.token = sha256(uuid_send(lease_abandon.token)) for update nowait;
    if not found then
        return false;
    end if;
    l.keep_until := null;
    perform holdfast.lease_end(l, 'released', false);
    delete from holdfast.beat b where b.id = l.beat;
    return true;
end $$;

-- For operators: release the lease of any holder. Waits at most 5 s for transactions that it protects; with
-- wait => false it fails with 55P03 at once.
create function holdfast.lease_force_release(name text, actor text, reason text, wait boolean default true) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    l holdfast.lease;
begin
    perform holdfast.audit_check(actor, reason);
    if wait then
        select * into l from holdfast.lease x where x.name = lease_force_release.name for update;
    else
        select * into l from holdfast.lease x where x.name = lease_force_release.name for update nowait;
    end if;
    if not found then
        return false;
    end if;
    perform holdfast.lease_end(l, 'forced', true, actor, reason);
    perform holdfast.audit_act('lease_force_release', l.name, actor, reason, l.fence, jsonb_build_object('holder', l.holder));
    return true;
end $$;

-- The heartbeat. No row: the beat is lost for ever. After an error, retry until trust ends. A crash must not undo it, because
-- the holder relies on it: hence never synchronous_commit = off, as in draw. The generation that it returns also differs in another
-- life of the server: a failover or a restore may have lost a lease, or its release, and kept the beat.
create function holdfast.beat_renew(beat uuid) returns table (generation bigint)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    return query update holdfast.beat b set expires_at = clock_timestamp() + b.ttl, unseen_at = null,
            server_started = case when b.session_key >> 48 = 7846 then pg_postmaster_start_time() else b.server_started end
     where b.id = sha256(uuid_send(beat_renew.beat)) and not b.dead and b.expires_at > clock_timestamp() returning b.generation # holdfast.server_life();
end $$;

create function holdfast.beat_leases(beat uuid) returns table (name text, fence bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    beat_id bytea := sha256(uuid_send(beat_leases.beat));
begin
    return query select l.name, l.fence from holdfast.lease l where l.beat = beat_id;
end $$;

-- Release a lease of the beat that its process does not know: the acquire was granted and its answer was lost. Fails with 55P03 while
-- the lease protects a transaction.
create function holdfast.beat_release(beat uuid, name text, fence bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    l holdfast.lease;
begin
    select * into l from holdfast.lease x
     where x.name = beat_release.name and x.fence = beat_release.fence and x.beat = sha256(uuid_send(beat_release.beat)) for update nowait;
    if not found then
        return false;
    end if;
    perform holdfast.lease_end(l, 'released', false);
    return true;
end $$;

-- End a process: release its leases, at most 1,000 per call, because each one occupies the server's lock table until the
-- commit. Call it until it returns 0. A lease that still protects a transaction expires with the beat instead.
create function holdfast.beat_end(beat uuid) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
#variable_conflict use_column
declare
    l holdfast.lease;
    beat_id bytea := sha256(uuid_send(beat));
    ended int := 0;
begin
    for l in select * from holdfast.lease x where x.beat = beat_id order by x.name limit 1000 for update skip locked loop
        perform holdfast.lease_end(l, 'released', false);
        ended := ended + 1;
    end loop;
    if ended = 1000 then
        return ended;
    end if;
    if exists (select from holdfast.lease x where x.beat = beat_id) then
        update holdfast.beat b set dead = true where b.id = beat_id;
    else
        delete from holdfast.beat b where b.id = beat_id;
    end if;
    return ended;
end $$;

-- Clean up after crashed processes: mark expired beats dead, end their leases, delete both. Short lock_timeout: the caller
-- may hold session leases and must not lose its session here.
create function holdfast.purge() returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms' as $$
declare
    l holdfast.lease;
    ended int := 0;
begin
    update holdfast.beat b set dead = true
     where b.id in (select x.id from holdfast.beat x where not x.dead and x.expires_at <= clock_timestamp()
                     order by x.id for no key update skip locked);
    for l in select x.* from holdfast.lease x
              where not exists (select from holdfast.beat b where b.id = x.beat and not b.dead) order by x.name limit 1000 for update skip locked loop
        -- Between the selection and the row lock, the lease may have moved to a beat that the query's snapshot does not contain.
        continue when exists (select from holdfast.beat b where b.id = l.beat and not b.dead);
        perform holdfast.lease_end(l, 'expired', false);
        ended := ended + 1;
    end loop;
    delete from holdfast.beat b
     where b.id in (select x.id from holdfast.beat x where x.dead and not exists (select from holdfast.lease y where y.beat = x.id)
                       for update skip locked);
    delete from holdfast.history h
     where h.id in (select x.id from holdfast.history x where x.id <= (select max(y.id) from holdfast.history y) - 10000 for update skip locked);
    return ended;
end $$;

-- waiting: the sessions that hold the shared lock on the name; a process has one. Waiters behind a pooler poll, and are not counted.
create function holdfast.lease_list(only_name text default null)
returns table (name text, kind text, holder text, fence bigint, acquired_at double precision, expires_at double precision,
               remaining double precision, host text, pid int, info jsonb, waiting integer, role text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.name, l.kind, l.holder, l.fence, extract(epoch from l.acquired_at)::double precision,
           extract(epoch from b.expires_at)::double precision,
           extract(epoch from b.expires_at - clock_timestamp())::double precision, b.host, b.pid,
           coalesce(b.info, '{}') - 'failover' || jsonb_build_object('label', b.label, 'started', extract(epoch from b.started), 'ttl', extract(epoch from b.ttl))
               || case when b.session_key is null then '{}' else '{"failover": "session"}'::jsonb end,
           coalesce(w.waiting, 0), l.role
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
      left join (select k.objid, count(*)::integer as waiting from pg_locks k
                  where k.locktype = 'advisory' and k.classid = hashtext('holdfast.free')::oid and k.objsubid = 2 and k.mode = 'ShareLock'
                    and k.database = (select d.oid from pg_database d where d.datname = current_database())
                  group by k.objid) w on w.objid = hashtext(holdfast.waiters_name(l.name))::oid
     where not b.dead and b.expires_at > clock_timestamp() and (only_name is null or l.name = only_name)
     order by l.name;
end $$;

create function holdfast.lease_history(only_name text default null, max_rows integer default 100)
returns table (name text, holder text, role text, host text, pid int, fence bigint, acquired_at double precision, ended_at double precision,
               outcome text, actor text, reason text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select h.name, h.holder, h.role, h.host, h.pid, h.fence, extract(epoch from h.acquired_at)::double precision,
           extract(epoch from h.ended_at)::double precision, h.outcome, h.actor, h.reason
      from holdfast.history h where only_name is null or h.name = only_name
     order by h.id desc limit max_rows;
end $$;

-- Where the first of so many buckets of "step" seconds begins: the last one contains the present.
create function holdfast.activity_start(step double precision, buckets integer) returns double precision
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return (floor(extract(epoch from clock_timestamp()) / step) + 1 - buckets) * step;
end $$;

-- What became of leases, by time: how many were acquired and lost in each bucket. Rows without a bucket: "start" of the first one, and "complete"
-- since when, if older grants are not kept.
create function holdfast.lease_activity(step double precision, buckets integer)
returns table (bucket integer, kind text, value double precision)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    start double precision := holdfast.activity_start(step, buckets);
    begun timestamptz := to_timestamp(start);
begin
    return query select null::integer, 'start', start;
    return query select null::integer, 'complete', extract(epoch from h.ended_at)::double precision
      from holdfast.history h where h.id = (select min(x.id) from holdfast.history x) and h.id > 1;
    return query
    select floor((extract(epoch from e.at) - start) / step)::integer, e.kind, count(*)::double precision
      from (select l.acquired_at as at, 'acquired' as kind from holdfast.lease l where not l.kept and l.acquired_at >= begun
            union all select h.acquired_at, 'acquired' from holdfast.history h where h.acquired_at >= begun
            union all select h.ended_at, h.outcome from holdfast.history h
             where h.ended_at >= begun and h.outcome in ('expired', 'session_lost', 'forced')) e
     group by 1, 2;
end $$;

-- Rolling back a savepoint also releases the row lock that was taken in it. xmax names the locker: this transaction, one of
-- its savepoints, or a multixact if several transactions protect the same lease.
create function holdfast.check_savepoint(locker xid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    top xid := pg_current_xact_id()::xid;
begin
    if locker = top then
        return;
    end if;
    if exists (select from pg_locks k where k.pid = pg_backend_pid() and k.locktype = 'transactionid' and k.transactionid = locker
                  and k.mode = 'ExclusiveLock')
       or not exists (select from pg_get_multixact_members(locker) m where m.xid = top) then
        raise exception 'a lease cannot protect a savepoint: ROLLBACK TO would drop the protection'
            using errcode = 'HF002', hint = 'Protect the transaction before its first savepoint.';
    end if;
end $$;

create function holdfast.fenced_out(name text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    raise exception 'lease % has passed on: this transaction cannot commit', quote_literal(name)
        using errcode = 'HF001', hint = 'Roll back. The work now belongs to the next holder.';
end $$;

-- The time at which to check whether the beat has expired. Under repeatable read, a transaction does not see heartbeats
-- since it began: the beat must have been alive then. The lock on the lease row excludes a takeover after that.
create function holdfast.snapshot_time() returns timestamptz
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return case when current_setting('transaction_isolation') in ('repeatable read', 'serializable')
                then transaction_timestamp() else clock_timestamp() end;
end $$;

-- First statement of the user's transaction: a takeover waits for this transaction, and a replaced holder is refused. An
-- expired beat is refused as well, because overlapping transactions could delay a takeover for ever.
create function holdfast.lease_protect(name text, token uuid) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    r record;
    locker xid;
    idle_ms bigint;
    as_of timestamptz := holdfast.snapshot_time();
begin
    select l.fence, greatest(1, extract(epoch from b.ttl) * 1000)::bigint as ttl_ms into r
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = lease_protect.name and l.token = sha256(uuid_send(lease_protect.token)) and not b.dead and b.expires_at > as_of
       for share of l;
    if not found then
        perform holdfast.fenced_out(name);
    end if;
    select l.xmax into locker from holdfast.lease l where l.name = lease_protect.name;
    perform holdfast.check_savepoint(locker);
    -- An idle holder delays its successor for at most one TTL. 0 would mean: no limit.
    idle_ms := extract(epoch from current_setting('idle_in_transaction_session_timeout')::interval) * 1000;
    if idle_ms = 0 or idle_ms > r.ttl_ms then
        perform set_config('idle_in_transaction_session_timeout', r.ttl_ms::text, true);
    end if;
    -- One that works delays it for ten TTLs. hot: limit_transaction() and protect_key(), inlined
    if current_setting('transaction_timeout', true) = '0' then
        perform set_config('transaction_timeout', greatest(r.ttl_ms * 10, 600000)::text, true);
    else
        perform holdfast.limit_transaction(greatest(r.ttl_ms / 100.0, 600));
    end if;
    perform pg_try_advisory_xact_lock_shared((7848::bigint << 48) | (hashtextextended(name, 0) & 281474976710655));
    return r.fence;
end $$;

create function holdfast.commit_check() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    detail text;
begin
    perform from holdfast.lease l where l.name = new.name and l.token = new.token for share;
    if not found then
        perform holdfast.fenced_out(new.name);
    end if;
    return null;
exception when serialization_failure then
    get stacked diagnostics detail = pg_exception_detail;
    if detail <> '' then
        raise;  -- with a reason code: a conflict with another serializable transaction, which the user may retry
    end if;
    perform holdfast.fenced_out(new.name);  -- without one: the lease row was written, and only a takeover or a release does that
    return null;
end $$;

create constraint trigger commit_check after insert on holdfast.commit_check
    deferrable initially deferred for each row execute function holdfast.commit_check();
-- ALWAYS: the trigger fires under session_replication_role = replica, too, which bulk loads set to disable triggers.
alter table holdfast.commit_check enable always trigger commit_check;

-- For long transactions: checks the lease now, and again inside COMMIT. A takeover does not wait for this transaction. The
-- row that queues the trigger is deleted at once; the queued trigger still fires. The DELETE is by ctid: a scan of the
-- table would make serializable transactions that protect different leases conflict.
create function holdfast.lease_protect_at_commit(name text, token uuid) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
    f bigint;
    x xid;
    place tid;
    token_hash bytea := sha256(uuid_send(token));
    as_of timestamptz := holdfast.snapshot_time();
begin
    select l.fence into f from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = lease_protect_at_commit.name and l.token = token_hash and not b.dead and b.expires_at > as_of;
    if not found then
        perform holdfast.fenced_out(name);
    end if;
    insert into holdfast.commit_check as c values (name, token_hash) returning c.xmin, c.ctid into x, place;
    if x <> pg_current_xact_id()::xid then
        raise exception 'a lease cannot protect a savepoint: ROLLBACK TO would drop the protection'
            using errcode = 'HF002', hint = 'Protect the transaction before its first savepoint.';
    end if;
    delete from holdfast.commit_check c where c.ctid = place;
    return f;
end $$;

-- lease_protect, or lease_protect_at_commit, for a client that writes parameters into the text of a statement, which other sessions of
-- its role can read: a proof that is good for this transaction alone takes the place of the token. It is the token XOR a mask, in
-- hexadecimal; the mask is the hash of the stored hash and the transaction's id. So who has read either the proof or the table has no token.
create function holdfast.lease_protect_proven(name text, proof text, at_commit boolean) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    token uuid;
begin
    select string_agg(lpad(to_hex(get_byte(decode(proof, 'hex'), i) # get_byte(m.mask, i)), 2, '0'), '' order by i)::uuid into token
      from (select sha256(l.token || convert_to(pg_current_xact_id()::text, 'UTF8')) as mask
              from holdfast.lease l where l.name = lease_protect_proven.name) m, generate_series(0, 15) i;
    return case when at_commit then holdfast.lease_protect_at_commit(name, token) else holdfast.lease_protect(name, token) end;
end $$;

-- Of the functions in docs/reference/sql.md. It rises with a change that breaks callers; new functions, and new arguments with a
-- default behind the others, break none.
create function holdfast.sql_version() returns integer
language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$ select 1 $$;

-- Called once per connection: returns the versions of tables and functions, and begins a new space of cursors in another copy of
-- the data.
create function holdfast.hello(out version integer, out sql_version integer)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.current_space();
    version := (select max(s.version) from holdfast.schema_version s);
    sql_version := holdfast.sql_version();
end $$;

revoke all on function holdfast.protect_key(text), holdfast.limit_transaction(double precision), holdfast.beat_look(bytea), holdfast.history_trim(), holdfast.copy_id(), holdfast.server_life(), holdfast.clock_number(),
    holdfast.set_numbers(bigint, bigint, bigint), holdfast.raise_number(regclass), holdfast.draw(regclass), holdfast.random_space(), holdfast.current_space(),
    holdfast.fence_raise(bigint, bigint), holdfast.fence_ahead(),
    holdfast.check_name(text, text), holdfast.check_gateway(text), holdfast.check_kind(text, text), holdfast.waiters_name(text), holdfast.wake_payload(text), holdfast.wake(text),
    holdfast.lease_end(holdfast.lease, text, boolean, text, text),
    holdfast.lease_take(text, text, text, double precision, uuid, uuid, text, double precision, boolean, bigint, jsonb),
    holdfast.lease_acquire(text, text, double precision, uuid, uuid, text, double precision, boolean, bigint, jsonb),
    holdfast.lease_renew(text, uuid), holdfast.lease_status(text, uuid), holdfast.lease_await(text, bytea), holdfast.lease_release(text, text, uuid, boolean, boolean),
    holdfast.lease_try(text, text, uuid, double precision), holdfast.sql_version(),
    holdfast.lease_abandon(text, uuid), holdfast.lease_force_release(text, text, text, boolean), holdfast.owner_hold(bigint), holdfast.beat_renew(uuid),
    holdfast.beat_leases(uuid), holdfast.beat_release(uuid, text, bigint), holdfast.beat_end(uuid), holdfast.purge(), holdfast.lease_list(text), holdfast.lease_history(text, integer),
    holdfast.activity_start(double precision, integer), holdfast.lease_activity(double precision, integer),
    holdfast.check_savepoint(xid), holdfast.fenced_out(text), holdfast.snapshot_time(), holdfast.lease_protect(text, uuid), holdfast.commit_check(),
    holdfast.lease_protect_at_commit(text, uuid), holdfast.lease_protect_proven(text, text, boolean), holdfast.hello() from public;

insert into holdfast.schema_version (version, name) values (1, 'lease');
