-- The durable lease: one heartbeat row a process and TTL, leases that point at it, fences that only rise,
-- and a guard that makes the database itself refuse a holder that has been superseded.
--
-- Lock rules, kept by every function here:
--   * an acquire never waits: SKIP LOCKED on lease and beat, a try-lock before the INSERT of a free name; the answer is
--     "busy" then, and the caller tries again soon;
--   * lease before beat wherever both are waited for (renew, release, force_release); a thief locks beat first, but skips;
--   * a heartbeat touches the beat row alone, a protected transaction the lease row alone: they never meet;
--   * one acquire a transaction: two free names taken in opposite orders would deadlock.
-- Every function pins its search_path, because SECURITY DEFINER without one can be hijacked. Those that only other
-- functions here call are not SECURITY DEFINER: called directly by a role without rights on the tables, they fail.

-- Not "if not exists", which asks for the right to make one where there is nothing to make.
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

-- CACHE stays 1: a cached block would let fences go back between sessions.
create sequence holdfast.fence as bigint maxvalue 1099511627775 no cycle cache 1;

create table holdfast.meta (
    one        boolean primary key default true check (one),
    epoch_base bigint not null default 0 check (epoch_base >= 0),
    timeline   bigint not null,
    cluster    bigint not null,
    home       oid not null,
    our_schema boolean not null
);
comment on column holdfast.meta.home is 'the oid of this table: another one after a dump was restored, be it into the same cluster';
comment on column holdfast.meta.our_schema is 'made here, and to go with the last table; one that was there before stays, and "public" always';

-- Renewed in place by every heartbeat, hence the room for HOT updates and the eager vacuum.
create table holdfast.beat (
    id             uuid primary key,
    ttl            interval not null check (ttl between interval '50 ms' and interval '1 day'),
    expires_at     timestamptz not null,
    dead           boolean not null default false,
    generation     bigint not null default 0,
    solo           boolean not null,
    session_key    bigint,
    server_started timestamptz,
    label          text not null,
    host           text,
    pid            int,
    started        timestamptz not null default clock_timestamp(),
    info           jsonb check (pg_column_size(info) <= 4096)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on column holdfast.beat.solo is 'serves one lease only, and goes with it';
comment on column holdfast.beat.generation is 'rises when one of its leases is taken away while it lives; the next heartbeat learns of it';
comment on column holdfast.beat.session_key is 'advisory key its session holds: free means that session is gone (failover = session)';

-- No foreign key to beat: it would make a multixact of every acquire. A missing beat counts as dead.
create table holdfast.lease (
    name        text collate "C" primary key,
    holder      text not null,
    beat        uuid not null,
    token       uuid not null,
    fence       bigint not null,
    acquired_at timestamptz not null,
    keep_until  timestamptz,
    kept        boolean not null default false
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

comment on column holdfast.lease.kept is 'released before keep_until: nobody''s until its beat ends, and its release is told in history already';

create table holdfast.history (
    id          bigint generated always as identity primary key,
    name        text not null,
    holder      text not null,
    host        text,
    pid         int,
    fence       bigint not null,
    acquired_at timestamptz not null,
    ended_at    timestamptz not null,
    outcome     text not null check (outcome in ('released', 'expired', 'session_lost', 'reentered', 'forced')),
    actor       text,
    reason      text
);

-- The newest 10,000 stay, whoever writes; nobody may be there to purge. It waits for nobody, and under a snapshot that is kept
-- it is left to others, because it could fail there and take the caller's transaction with it.
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
    token uuid not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- The WAL timeline, from the name of the file being written: pg_control_checkpoint() is stale right after a promotion.
create function holdfast.timeline() returns bigint
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
$$;

-- The schema is ours when this very transaction made it.
insert into holdfast.meta (timeline, cluster, home, our_schema)
select holdfast.timeline(), c.system_identifier, 'holdfast.meta'::regclass,
       n.xmin = pg_current_xact_id()::xid and n.nspname <> 'public'
  from pg_catalog.pg_control_system() c, pg_catalog.pg_namespace n where n.nspname = 'holdfast';

-- The high bits of the next fence. They rise with the timeline (a failover may have lost the last commits, and the
-- sequence with them) and, after a dump was restored here or into another cluster, with the stored epoch.
create function holdfast.check_epoch() returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    t bigint := holdfast.timeline();
    c bigint := (select system_identifier from pg_control_system());
    e bigint;
begin
    update holdfast.meta m
       set epoch_base = m.epoch_base + case when m.cluster <> c or m.home <> 'holdfast.meta'::regclass or m.timeline > t
                                            then greatest(m.timeline - t, 0) + 1 else 0 end,
           timeline = t, cluster = c, home = 'holdfast.meta'::regclass
     where m.timeline <> t or m.cluster <> c or m.home <> 'holdfast.meta'::regclass;
    select m.epoch_base + t into strict e from holdfast.meta m;
    return e;
end $$;

-- This commit waits for the disk, whatever the role or the database says: a crash that forgot it would give the number out again.
create function holdfast.next_fence() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    t bigint := holdfast.timeline();
    m record;
    epoch bigint;
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    select * into strict m from holdfast.meta;
    epoch := m.epoch_base + t;
    if m.timeline <> t or m.home <> 'holdfast.meta'::regclass then
        epoch := holdfast.check_epoch();
    end if;
    return (epoch << 40) | nextval('holdfast.fence');
end $$;

create function holdfast.check_name(what text, value text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if value is null or length(value) not between 1 and 200 or value ~ '[[:cntrl:]]' then
        raise exception '% must have 1 to 200 characters and no control characters, not %', what, coalesce(quote_literal(left(value, 60)), 'NULL')
            using errcode = 'invalid_parameter_value';
    end if;
end $$;

-- Tell the waiters of a name, if there are any. A waiter holds a shared lock on the name's key in the session that
-- listens; when we get it exclusively nobody waits, and nobody can begin to until we have committed. NOTIFY on every
-- release would halve the throughput of all.
create function holdfast.wake(name text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if not pg_try_advisory_xact_lock(hashtext('holdfast.free'), hashtext(name)) then
        perform pg_notify('holdfast.free', name);
    end if;
end $$;

-- The one place where a lease ends other than by passing to the next holder. The caller has locked its row.
create function holdfast.lease_end(l holdfast.lease, outcome text, tell boolean, actor text default null, reason text default null) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    b record;
    now timestamptz := clock_timestamp();
    stay uuid;
begin
    select * into b from holdfast.beat where id = l.beat;
    if not l.kept or outcome = 'forced' then
        insert into holdfast.history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
        values (l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at,
                case when outcome = 'expired' then least(b.expires_at, now) else now end, outcome, actor, reason);
    end if;
    if outcome = 'released' and l.keep_until > now then
        stay := gen_random_uuid();
        insert into holdfast.beat (id, ttl, expires_at, solo, label, host, pid, started)
        values (stay, greatest(l.keep_until - now, interval '50 ms'), l.keep_until, true, coalesce(b.label, l.holder), b.host, b.pid, coalesce(b.started, now));
        update holdfast.lease set beat = stay, token = gen_random_uuid(), keep_until = null, kept = true where lease.name = l.name;
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

-- Acquire, take over or re-enter. status: acquired | taken_over | reentered | held | busy (try again soon) | beat_lost.
-- Without a beat one is made for this lease alone, to be renewed with lease_renew(name, token). With a beat and a process it
-- is made when it is not there yet, for all leases of that process; without a process it has to be there.
-- A refused acquire writes nothing at all.
create function holdfast.lease_acquire(
    name text, holder text, ttl_seconds double precision,
    inout token uuid default null, inout beat uuid default null,
    reenter boolean default true, at_least_seconds double precision default 0,
    solo boolean default true, session_key bigint default null, process jsonb default null,
    out status text, out fence bigint, out held_by text, out remaining double precision, out session_watch bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    r record;
    taken boolean;
    gone boolean;
    founds boolean;
    want uuid := coalesce(lease_acquire.token, gen_random_uuid());
    beat_id uuid := coalesce(lease_acquire.beat, gen_random_uuid());
    keep timestamptz;
    number bigint;
begin
    perform holdfast.check_name('name', lease_acquire.name);
    perform holdfast.check_name('holder', lease_acquire.holder);
    if ttl_seconds is null or ttl_seconds not between 0.05 and 86400 then
        raise exception 'ttl_seconds must be between 0.05 and 86400, not %', ttl_seconds using errcode = 'invalid_parameter_value';
    end if;
    if at_least_seconds is null or at_least_seconds not between 0 and 86400 then
        raise exception 'at_least_seconds must be between 0 and 86400, not %', at_least_seconds using errcode = 'invalid_parameter_value';
    end if;
    lease_acquire.token := null;
    for attempt in 1..4 loop
        select l.*, b.id is null or b.dead as dead, coalesce(b.expires_at <= clock_timestamp(), true) as expired,
               b.expires_at, b.solo, b.host, b.pid, b.session_key, b.server_started
          into r from holdfast.lease l left join holdfast.beat b on b.id = l.beat where l.name = lease_acquire.name;
        taken := found;
        if taken and r.token = want and not r.dead and not r.expired then
            -- The same request once more, its answer was lost. The write makes this commit wait for a standby, too.
            update holdfast.lease l set holder = r.holder where l.name = r.name and l.token = want;
            status := 'acquired'; token := want; beat := r.beat; fence := r.fence;
            remaining := extract(epoch from r.expires_at - clock_timestamp());
            return;
        end if;
        gone := false;
        if taken and not r.dead and not r.expired and r.session_key is not null and r.server_started = pg_postmaster_start_time() then
            gone := pg_try_advisory_xact_lock_shared(r.session_key);
        end if;
        if taken and not (r.dead or r.expired or gone) and not (reenter and r.holder = lease_acquire.holder and not r.kept) then
            status := 'held'; held_by := r.holder; session_watch := r.session_key;
            remaining := extract(epoch from r.expires_at - clock_timestamp()); beat := null;
            return;
        end if;
        founds := lease_acquire.beat is null;
        if not founds then
            select case when not b.dead then extract(epoch from b.expires_at - clock_timestamp()) end into remaining from holdfast.beat b where b.id = beat_id;
            founds := not found and process is not null;
            -- What is held by the asker's own beat may be gone with its session: then the beat is.
            if not founds and coalesce(remaining, 0) <= 0 or gone and r.beat = beat_id then
                status := 'beat_lost'; remaining := null;
                return;
            end if;
        end if;
        keep := clock_timestamp() + make_interval(secs => nullif(at_least_seconds, 0));
        if not taken then
            -- Somebody may have inserted this very name and not committed yet: the INSERT would wait for that.
            exit when not pg_try_advisory_xact_lock(hashtext('holdfast.take'), hashtext(lease_acquire.name));
            number := holdfast.next_fence();
            insert into holdfast.lease as l values (lease_acquire.name, lease_acquire.holder, beat_id, want, number, clock_timestamp(), keep)
                on conflict do nothing;
            continue when not found;
            -- The row is ours now. Whoever drew a number since we drew ours may have held and released this very name: draw again.
            if pg_sequence_last_value('holdfast.fence'::regclass) <> (number & 1099511627775) then
                number := holdfast.next_fence();
                update holdfast.lease l set fence = number where l.name = lease_acquire.name;
            end if;
            status := 'acquired';
        else
            if not r.dead and (r.expired or gone) then
                -- The first thief declares the beat dead, so that a renewal in flight either wins or is refused for ever.
                perform from holdfast.beat b
                  where b.id = r.beat and not b.dead and (gone or b.expires_at <= clock_timestamp()) for no key update skip locked;
                if not found then
                    status := 'busy';
                    continue;
                end if;
                update holdfast.beat b set dead = true where b.id = r.beat;
            end if;
            perform from holdfast.lease l where l.name = lease_acquire.name and l.token = r.token for no key update skip locked;
            if not found then
                status := 'busy';
                continue;
            end if;
            status := case when r.dead or r.expired or gone then 'taken_over' else 'reentered' end;
            number := holdfast.next_fence();
            update holdfast.lease l set holder = lease_acquire.holder, beat = beat_id, token = want, fence = number,
                   acquired_at = clock_timestamp(), keep_until = keep, kept = false
             where l.name = lease_acquire.name;
            if not r.kept then
                insert into holdfast.history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
                values (r.name, r.holder, r.host, r.pid, r.fence, r.acquired_at, least(coalesce(r.expires_at, clock_timestamp()), clock_timestamp()),
                        case when status = 'reentered' then 'reentered' when gone then 'session_lost' else 'expired' end);
            end if;
            if r.solo and r.beat <> beat_id then
                delete from holdfast.beat b where b.id = r.beat;
            elsif status = 'reentered' then
                update holdfast.beat b set generation = b.generation + 1 where b.id = r.beat;  -- the twin must learn
            end if;
            held_by := r.holder;
        end if;
        if founds then
            insert into holdfast.beat (id, ttl, expires_at, solo, session_key, server_started, label, host, pid, started, info)
            values (beat_id, make_interval(secs => ttl_seconds), clock_timestamp() + make_interval(secs => ttl_seconds), lease_acquire.solo,
                    lease_acquire.session_key, case when lease_acquire.session_key is not null then pg_postmaster_start_time() end,
                    coalesce(left(process ->> 'label', 200), lease_acquire.holder), process ->> 'host', (process ->> 'pid')::int,
                    coalesce(to_timestamp((process ->> 'started')::double precision), clock_timestamp()), process -> 'info') on conflict do nothing;
            remaining := ttl_seconds;
            if not found then  -- another session of the same process was first
                select case when b.dead then 0 else extract(epoch from b.expires_at - clock_timestamp()) end into remaining from holdfast.beat b where b.id = beat_id;
            end if;
        end if;
        token := want; beat := beat_id; fence := number;
        return;
    end loop;
    status := 'busy'; beat := null; remaining := null;
end $$;

-- Renew the lease's beat. FOR SHARE ties the secret to the row: a sub-select could answer true to a holder just replaced.
create function holdfast.lease_renew(name text, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    beat_id uuid;
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    select l.beat into beat_id from holdfast.lease l where l.name = lease_renew.name and l.token = lease_renew.token for share;
    update holdfast.beat b set expires_at = clock_timestamp() + b.ttl where b.id = beat_id and not b.dead and b.expires_at > clock_timestamp();
    return found;
end $$;

-- Is it still ours? For grants that no heartbeat of this process keeps.
create function holdfast.lease_status(name text, token uuid)
returns table (holder text, fence bigint, ttl double precision, remaining double precision)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.holder, l.fence, extract(epoch from b.ttl)::double precision, extract(epoch from b.expires_at - clock_timestamp())::double precision
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = lease_status.name and l.token = lease_status.token and not b.dead and b.expires_at > clock_timestamp();
end $$;

-- False for a foreign or stale token. Waits a bounded time for transactions this lease protects; with wait => false it
-- answers 55P03 at once instead. Whoever keeps it alive is told with its next heartbeat, unless it knows.
create function holdfast.lease_release(name text, token uuid, wait boolean default true, tell boolean default true) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    l holdfast.lease;
begin
    if wait then
        select * into l from holdfast.lease x where x.name = lease_release.name and x.token = lease_release.token for update;
    else
        select * into l from holdfast.lease x where x.name = lease_release.name and x.token = lease_release.token for update nowait;
    end if;
    if not found then
        return false;
    end if;
    perform holdfast.lease_end(l, 'released', tell);
    return true;
end $$;

-- Undo an acquire whose answer nobody heard, and the beat that it made for itself. Nobody has worked under it, so it is
-- not kept for at_least either.
create function holdfast.lease_abandon(name text, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    l holdfast.lease;
begin
    select * into l from holdfast.lease x where x.name = lease_abandon.name and x.token = lease_abandon.token for update nowait;
    if not found then
        return false;
    end if;
    l.keep_until := null;
    perform holdfast.lease_end(l, 'released', false);
    delete from holdfast.beat b where b.id = l.beat;
    return true;
end $$;

-- For operators: takes the lease away from whoever has it. Waits (5 s at most) for transactions it protects; with
-- wait => false it answers 55P03 at once instead.
create function holdfast.lease_force_release(name text, actor text, reason text, wait boolean default true) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    l holdfast.lease;
begin
    perform holdfast.check_name('actor', actor);
    if coalesce(length(reason), 0) not between 1 and 1000 then
        raise exception 'reason must have 1 to 1000 characters' using errcode = 'invalid_parameter_value';
    end if;
    if wait then
        select * into l from holdfast.lease x where x.name = lease_force_release.name for update;
    else
        select * into l from holdfast.lease x where x.name = lease_force_release.name for update nowait;
    end if;
    if not found then
        return false;
    end if;
    perform holdfast.lease_end(l, 'forced', true, actor, reason);
    return true;
end $$;

-- The heartbeat. No row: lost for ever. An error is not an answer: ask again until trust ends. As with next_fence, a crash must
-- not forget it: its holder trusts in it.
create function holdfast.beat_renew(beat uuid) returns table (generation bigint)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    if current_setting('synchronous_commit') = 'off' then perform set_config('synchronous_commit', 'on', true); end if;
    return query update holdfast.beat b set expires_at = clock_timestamp() + b.ttl
     where b.id = beat_renew.beat and not b.dead and b.expires_at > clock_timestamp() returning b.generation;
end $$;

create function holdfast.beat_leases(beat uuid) returns table (token uuid)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.token from holdfast.lease l where l.beat = beat_leases.beat;
end $$;

-- A process goes: its leases are released, a thousand at a time, because each has a place in the server's lock table until the
-- commit: call it until it answers 0. One that a transaction still protects is left to expire with the beat.
create function holdfast.beat_end(beat uuid) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
#variable_conflict use_column
declare
    l holdfast.lease;
    ended int := 0;
begin
    for l in select * from holdfast.lease x where x.beat = beat_end.beat order by x.name limit 1000 for update skip locked loop
        perform holdfast.lease_end(l, 'released', false);
        ended := ended + 1;
    end loop;
    if ended = 1000 then
        return ended;
    end if;
    if exists (select from holdfast.lease x where x.beat = beat_end.beat) then
        update holdfast.beat b set dead = true where b.id = beat_end.beat;
    else
        delete from holdfast.beat b where b.id = beat_end.beat;
    end if;
    return ended;
end $$;

-- What crashed processes left: expired beats are declared dead, their leases ended, both removed. Waits for nobody to speak
-- of: whoever asks may hold leases that end with its session, and must not lose that over this.
create function holdfast.purge() returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms' as $$
declare
    l holdfast.lease;
    ended int := 0;
begin
    update holdfast.beat b set dead = true
     where b.id in (select x.id from holdfast.beat x where not x.dead and x.expires_at <= clock_timestamp() order by x.id for no key update skip locked);
    for l in select x.* from holdfast.lease x
              where not exists (select from holdfast.beat b where b.id = x.beat and not b.dead) order by x.name limit 1000 for update skip locked loop
        -- The row is locked now, and may have passed on since it was chosen: to a beat that the choice could not see.
        continue when exists (select from holdfast.beat b where b.id = l.beat and not b.dead);
        perform holdfast.lease_end(l, 'expired', false);
        ended := ended + 1;
    end loop;
    delete from holdfast.beat b
     where b.id in (select x.id from holdfast.beat x where x.dead and not exists (select from holdfast.lease y where y.beat = x.id) for update skip locked);
    delete from holdfast.history h
     where h.id in (select x.id from holdfast.history x where x.id <= (select max(y.id) from holdfast.history y) - 10000 for update skip locked);
    return ended;
end $$;

create function holdfast.lease_list(only_name text default null)
returns table (name text, holder text, fence bigint, acquired_at double precision, expires_at double precision, remaining double precision,
               host text, pid int, info jsonb)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select l.name, l.holder, l.fence, extract(epoch from l.acquired_at)::double precision, extract(epoch from b.expires_at)::double precision,
           extract(epoch from b.expires_at - clock_timestamp())::double precision, b.host, b.pid,
           coalesce(b.info, '{}') || jsonb_build_object('label', b.label, 'started', extract(epoch from b.started), 'ttl', extract(epoch from b.ttl))
      from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where not b.dead and b.expires_at > clock_timestamp() and (only_name is null or l.name = only_name)
     order by l.name;
end $$;

create function holdfast.lease_history(only_name text default null, most integer default 100)
returns table (name text, holder text, host text, pid int, fence bigint, acquired_at double precision, ended_at double precision,
               outcome text, actor text, reason text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select h.name, h.holder, h.host, h.pid, h.fence, extract(epoch from h.acquired_at)::double precision,
           extract(epoch from h.ended_at)::double precision, h.outcome, h.actor, h.reason
      from holdfast.history h where only_name is null or h.name = only_name
     order by h.id desc limit most;
end $$;

-- A savepoint rolled back takes the row lock with it. xmax names the locker: ourselves, a savepoint of ours, or a
-- multixact when several transactions protect the same lease.
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

-- When the beat's expiry is to be judged. A transaction that keeps its snapshot does not see the heartbeats since it
-- began, so what counts is that the beat lived then; the lock on the lease's row does the rest.
create function holdfast.snapshot_time() returns timestamptz
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    return case when current_setting('transaction_isolation') in ('repeatable read', 'serializable') then transaction_timestamp() else clock_timestamp() end;
end $$;

-- First statement of the user's transaction: whoever takes the lease over waits for this transaction, and a holder
-- already replaced is refused. It also refuses when the beat is over, or overlapping transactions could starve a takeover.
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
     where l.name = lease_protect.name and l.token = lease_protect.token and not b.dead and b.expires_at > as_of
       for share of l;
    if not found then
        perform holdfast.fenced_out(name);
    end if;
    select l.xmax into locker from holdfast.lease l where l.name = lease_protect.name;
    perform holdfast.check_savepoint(locker);
    -- A holder that stops in here holds up its successor for one TTL at most. 0 would mean: no limit.
    idle_ms := extract(epoch from current_setting('idle_in_transaction_session_timeout')::interval) * 1000;
    if idle_ms = 0 or idle_ms > r.ttl_ms then
        perform set_config('idle_in_transaction_session_timeout', r.ttl_ms::text, true);
    end if;
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
        raise;  -- with a reason code: a conflict with another serializable transaction of the user's, who may try again
    end if;
    perform holdfast.fenced_out(new.name);  -- without one: the row was written, and only a takeover or a release does that
    return null;
end $$;

create constraint trigger commit_check after insert on holdfast.commit_check
    deferrable initially deferred for each row execute function holdfast.commit_check();
-- Whatever the session's replication role: a bulk load that switches triggers off does not switch off this one.
alter table holdfast.commit_check enable always trigger commit_check;

-- For long transactions: asks now, and again inside COMMIT. Nobody waits for this transaction meanwhile. The row that
-- brings the trigger about is deleted at once, which the trigger does not mind; by its place and never by a scan of the
-- table, which would make serializable transactions that protect different leases conflict.
create function holdfast.lease_protect_at_commit(name text, token uuid) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
    f bigint;
    x xid;
    place tid;
    as_of timestamptz := holdfast.snapshot_time();
begin
    select l.fence into f from holdfast.lease l join holdfast.beat b on b.id = l.beat
     where l.name = lease_protect_at_commit.name and l.token = lease_protect_at_commit.token and not b.dead and b.expires_at > as_of;
    if not found then
        perform holdfast.fenced_out(name);
    end if;
    insert into holdfast.commit_check as c values (name, token) returning c.xmin, c.ctid into x, place;
    if x <> pg_current_xact_id()::xid then
        raise exception 'a lease cannot protect a savepoint: ROLLBACK TO would drop the protection'
            using errcode = 'HF002', hint = 'Protect the transaction before its first savepoint.';
    end if;
    delete from holdfast.commit_check c where c.ctid = place;
    return f;
end $$;

-- Said once a connection: which schema is this, and has the cluster moved under it?
create function holdfast.hello() returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.check_epoch();
    return (select max(version) from holdfast.schema_version);
end $$;

revoke all on function holdfast.history_trim(), holdfast.timeline(), holdfast.check_epoch(), holdfast.next_fence(), holdfast.check_name(text, text), holdfast.wake(text),
    holdfast.lease_end(holdfast.lease, text, boolean, text, text),
    holdfast.lease_acquire(text, text, double precision, uuid, uuid, boolean, double precision, boolean, bigint, jsonb),
    holdfast.lease_renew(text, uuid), holdfast.lease_status(text, uuid), holdfast.lease_release(text, uuid, boolean, boolean),
    holdfast.lease_abandon(text, uuid), holdfast.lease_force_release(text, text, text, boolean), holdfast.beat_renew(uuid),
    holdfast.beat_leases(uuid), holdfast.beat_end(uuid), holdfast.purge(), holdfast.lease_list(text), holdfast.lease_history(text, integer),
    holdfast.check_savepoint(xid), holdfast.fenced_out(text), holdfast.snapshot_time(), holdfast.lease_protect(text, uuid), holdfast.commit_check(),
    holdfast.lease_protect_at_commit(text, uuid), holdfast.hello() from public;

insert into holdfast.schema_version (version, name) values (1, 'lease');
