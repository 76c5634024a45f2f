-- A lock lives in a session and needs no table. These are for the people who look at pg_locks, which shows numbers.

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
-- locks are the whole database's; with the schema in the key, each schema has locks of its own.
create function holdfast.lock_key(name text) returns bigint
language sql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
    select ('x' || left(encode(sha256(convert_to('holdfast' || chr(10) || name, 'UTF8')), 'hex'), 16))::bit(64)::bigint
$$;

-- The first key of ('name', 7): stable from its first use on. It follows from the name: whoever knows it goes on with it
-- when its row was lost, in a failover or with an older backup, and would else share no lock with those who come later.
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
        wanted := (wanted + 1) & 2147483647;  -- another name came to it first, or somebody else wrote ours down
    end loop;
    return found_id;
end $$;

-- Names that were locked: [[key, name], …]. The keys are computed here, so that nobody gives a lock a false name. Those
-- that nobody has used for a month go, a few at a time.
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
