-- A lock lives in a session and needs no table. These tables give names to the numbers in pg_locks.

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

-- Record the names of locks: [[key, name], …]. The keys are computed here, so that no caller can give a lock a false name.
-- Deletes names that have not been used for 30 days, at most 1,000 per call.
create function holdfast.lock_remember(names jsonb) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    written int;
begin
    insert into holdfast.lock_name as n (key, name)
    select distinct on (1) holdfast.lock_key(each ->> 1), left(each ->> 1, 200) from jsonb_array_elements(names) as each order by 1
        on conflict (key) do update set seen_at = clock_timestamp() where n.seen_at < clock_timestamp() - interval '1 day';
    get diagnostics written = row_count;
    delete from holdfast.lock_name where ctid = any (array(
        select o.ctid from holdfast.lock_name o where o.seen_at < clock_timestamp() - interval '30 days' limit 1000 for update skip locked));
    return written;
end $$;

revoke all on function holdfast.lock_key(text), holdfast.lock_namespace(text), holdfast.lock_remember(jsonb) from public;

insert into holdfast.schema_version (version, name) values (2, 'lock');
