-- A lock lives in a session and needs no table. These tables give names and ages to the numbers in pg_locks.

create table holdfast.lock_namespace (
    id   int primary key,
    name text collate "C" not null unique
);

create table holdfast.lock_name (
    key     bigint primary key,
    name    text not null,
    seen_at timestamptz not null default clock_timestamp()
);
create index lock_name_seen_at on holdfast.lock_name (seen_at);

-- Since when a session holds a lock, which the server does not keep; and how many requests wait for it in the process of that
-- session, not counting sessions that pg_locks shows as waiting. Written by the session itself. Rows of ended sessions are ignored, and
-- deleted by the next session that writes.
create unlogged table holdfast.lock_hold (
    pid     int,
    pair    boolean,
    key     bigint,
    since   timestamptz,
    waiting int not null,
    application text not null,
    primary key (pid, pair, key)
);
comment on column holdfast.lock_hold.pair is 'the key is two int: key = first << 32 | second';
comment on column holdfast.lock_hold.since is 'null: the session does not hold it';
comment on column holdfast.lock_hold.application is 'application_name of the session: its pid may be used again';

-- The advisory key of a name, for psql and for other languages: pg_advisory_lock(holdfast.lock_key('import')). Advisory
-- locks are database-wide; the key contains the schema, so that each schema has its own locks.
create function holdfast.lock_key(name text) returns bigint
language sql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
    select ('x' || left(encode(sha256(convert_to('holdfast' || chr(10) || name, 'UTF8')), 'hex'), 16))::bit(64)::bigint
$$;

-- The first key of ('name', 7), stable from its first use. It is derived from the name: if a failover or an older backup
-- loses the row, processes that cached the key and processes that ask later still share the lock.
create function holdfast.lock_namespace(name text) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    found_id int;
    wanted   bigint;
begin
    perform holdfast.check_name('namespace', lock_namespace.name);
    wanted := holdfast.lock_key(lock_namespace.name) & 2147483647;
    loop
        select n.id into found_id from holdfast.lock_namespace n where n.name = lock_namespace.name;
        exit when found;
        insert into holdfast.lock_namespace (id, name) values (wanted, lock_namespace.name)
            on conflict do nothing returning id into found_id;
        exit when found;
        wanted := (wanted + 1) & 2147483647;  -- another name has this id, or another session has just inserted our name
    end loop;
    return found_id;
end $$;

-- What a session has to say about its locks. names: [name, …] (their keys are computed here, so that no caller can give a lock a
-- false name). held: [[pair, key, age in seconds or null, waiting], …]; gone: [[pair, key], …]. is_first: its first note.
-- Deletes names that have not been used for 30 days, at most 1,000 per call.
create function holdfast.lock_note(is_first boolean, names jsonb, held jsonb, gone jsonb) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if is_first then
        delete from holdfast.lock_hold h
         where h.pid = pg_backend_pid()
            or not exists (select from pg_stat_activity a where a.pid = h.pid and a.application_name = h.application);
    end if;
    if names <> '[]' then
        insert into holdfast.lock_name as n (key, name)
        select distinct on (1) holdfast.lock_key(each), left(each, 200) from jsonb_array_elements_text(names) as each order by 1
            on conflict (key) do update set seen_at = clock_timestamp() where n.seen_at < clock_timestamp() - interval '1 day';
        delete from holdfast.lock_name where ctid = any (array(
            select o.ctid from holdfast.lock_name o where o.seen_at < clock_timestamp() - interval '30 days' limit 1000 for update skip locked));
    end if;
    delete from holdfast.lock_hold h using jsonb_array_elements(gone) as each
     where h.pid = pg_backend_pid() and h.pair = (each ->> 0)::boolean and h.key = (each ->> 1)::bigint;
    insert into holdfast.lock_hold as h (pid, pair, key, since, waiting, application)
    select pg_backend_pid(), (each ->> 0)::boolean, (each ->> 1)::bigint,
           case when (each ->> 2)::float8 between -60 and 1e9 then clock_timestamp() - make_interval(secs => (each ->> 2)::float8) end,
           (each ->> 3)::int, current_setting('application_name')
      from jsonb_array_elements(held) as each
        on conflict (pid, pair, key) do update set since = excluded.since, waiting = excluded.waiting;
    return true;
end $$;

-- The rows of lock_hold whose sessions live. A standby cannot read them: the table is unlogged.
create function holdfast.lock_holds() returns setof holdfast.lock_hold
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not pg_is_in_recovery() then
        return query select h.* from holdfast.lock_hold h
                      where exists (select from pg_stat_activity a where a.pid = h.pid and a.application_name = h.application);
    end if;
end $$;

revoke all on function holdfast.lock_key(text), holdfast.lock_namespace(text), holdfast.lock_note(boolean, jsonb, jsonb, jsonb),
                       holdfast.lock_holds() from public;

insert into holdfast.schema_version (version, name) values (2, 'lock');
