-- Compare-and-swap records, and the log of their changes.
--
-- A version is drawn from a sequence while the row is locked, with the fences' epoch as its high bits. It rises with every
-- write of any object and is never reused, neither after a delete nor after a failover that lost the last commits. So a
-- version identifies exactly one write.
--
-- A reader of the log asks for the changes between two snapshots: those that the later one sees and the earlier one does not.
-- So it misses nothing although transactions commit out of the order of their numbers, and never waits for a long
-- transaction. The order within is "place", which is drawn at commit: by the statement itself if it commits on its own,
-- inside COMMIT if it is part of the user's transaction. So a change that was committed earlier has the lower place.

create sequence holdfast.object_version as bigint maxvalue 1099511627775 no cycle cache 1;

create table holdfast.object (
    type       text collate "C" not null,
    id         text collate "C" not null,
    name       text collate "C",
    body       text,
    raw        bytea,
    labels     jsonb not null default '{}',
    version    bigint not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    primary key (type, id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
-- No CHECK here, nor on the log: the server would parse its text again for every write. object_put checks the payload.
comment on column holdfast.object.body is 'the payload as the JSON text that was written, or NULL if the payload is bytes';

create unique index object_name on holdfast.object (type, name) where name is not null;

create table holdfast.object_change (
    xid     xid8 not null,
    version bigint not null,
    place   bigint not null,
    type    text collate "C" not null,
    id      text collate "C" not null,
    kind    text not null,
    token   uuid,
    primary key (xid, version)
) with (autovacuum_vacuum_insert_scale_factor = 0.5);
comment on column holdfast.object_change.token is 'of the request: a repeated request finds the result of the first one by it';

-- The newest trimmed transaction: a reader whose snapshot does not contain it may have missed changes.
create table holdfast.object_trimmed (
    one   boolean primary key default true check (one),
    epoch bigint not null,
    xid   xid8 not null
);
insert into holdfast.object_trimmed (epoch, xid) values (0, '0');

-- Until when some client watches: writers send NOTIFY only until then.
create table holdfast.object_watched (
    one   boolean primary key default true check (one),
    until timestamptz not null
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into holdfast.object_watched (until) values ('-infinity');

-- Delete changes that are 100,000 numbers old: a change uses one number, one in the user's transaction two. It deletes only
-- changes that every open transaction can see, and never waits. Not under repeatable read or serializable: the DELETE could
-- fail with a serialization error and abort the caller's transaction.
create function holdfast.object_trim(newest bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_sort = off as $$
declare
    highest xid8;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        return;
    end if;
    perform from holdfast.object_trimmed for update skip locked;
    if not found then
        return;
    end if;
    with gone as (
        delete from holdfast.object_change c where c.ctid = any (array(
            select o.ctid from (select x.ctid, x.xid, x.version from holdfast.object_change x order by x.xid, x.version limit 5000) o
             where o.version <= newest - 100000 and o.xid < pg_snapshot_xmin(pg_current_snapshot())))
        returning c.xid, c.version
    )
    select max(g.xid) into highest from gone g where g.version >> 40 = newest >> 40;
    if highest is not null then
        update holdfast.object_trimmed t set epoch = newest >> 40,
               xid = case when t.epoch = newest >> 40 then greatest(t.xid, highest) else highest end;
    end if;
end $$;

-- The last step of every write: log the change, trim the log, notify the watchers.
create function holdfast.object_log(version bigint, place bigint, type text, id text, kind text, token uuid) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    watched boolean;
begin
    insert into holdfast.object_change values (pg_current_xact_id(), version, place, type, id, kind, token)
        returning exists (select from holdfast.object_watched w where w.until > clock_timestamp()) into watched;
    if 0 in (version & 1023, place & 1023) then  -- if every write draws both numbers, one of them may never be a multiple of 1024
        perform holdfast.object_trim(place);
    end if;
    if watched then
        perform pg_notify('holdfast.free', E'\x01objects');
    end if;
end $$;

-- Writes in the user's transaction, until its COMMIT. The table itself is always empty.
create unlogged table holdfast.object_late (
    version bigint not null,
    type    text collate "C" not null,
    id      text collate "C" not null,
    kind    text not null,
    token   uuid
);

create function holdfast.object_late() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.object_log(new.version, new.version >> 40 << 40 | nextval('holdfast.object_version'), new.type, new.id, new.kind, new.token);
    return null;
end $$;

create constraint trigger object_late after insert on holdfast.object_late
    deferrable initially deferred for each row execute function holdfast.object_late();
alter table holdfast.object_late enable always trigger object_late;  -- even under session_replication_role = replica

-- object_log, but inside COMMIT. The row that queues the trigger is deleted at once, as in lease_protect_at_commit.
create function holdfast.object_log_at_commit(version bigint, type text, id text, kind text, token uuid) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
    row_place tid;
begin
    insert into holdfast.object_late as l values (version, type, id, kind, token) returning l.ctid into row_place;
    delete from holdfast.object_late l where l.ctid = row_place;
end $$;

-- The high bits of the next version, as in next_fence, but without a function call unless the epoch has changed.
create function holdfast.object_epoch() returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    e bigint;
begin
    select m.epoch_base + m.timeline into e from holdfast.meta m
     where m.timeline = ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint and m.home = 'holdfast.meta'::regclass;
    return coalesce(e, holdfast.check_epoch());
end $$;

-- Raises HF001 unless the token holds the lease, and locks the lease row until the caller commits. It checks less than
-- lease_protect: rolling back a savepoint also undoes the write, and the transaction does not idle.
create function holdfast.object_fence(lease text, token uuid) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform from holdfast.lease l join holdfast.beat b on b.id = l.beat
      where l.name = lease and l.token = object_fence.token and not b.dead and b.expires_at > clock_timestamp() for share of l;
    if not found then
        perform holdfast.fenced_out(lease);
    end if;
end $$;

-- condition: create | match (the version is "expected") | any. status: done | exists | conflict | taken (object "owner" has
-- the name); current: the conflicting version. A conflict is a status and not an error, so that the caller's transaction
-- stays usable. again: the request is repeated; a write that was done is not done twice. lease: HF001 unless "lease_token"
-- holds that lease. late: part of a transaction that commits later, so its place in the log is drawn at that COMMIT.
create function holdfast.object_put(
    type text, id text, body text, raw text, condition text, expected bigint, rename boolean, inout name text, inout labels text,
    token uuid, again boolean, lease text, lease_token uuid, late boolean,
    out status text, out version bigint, out created_at double precision, out updated_at double precision, out current bigint, out owner text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    o holdfast.object;
    kind text;
    epoch bigint := holdfast.object_epoch() << 40;
    number bigint;
    born timestamptz;
begin
    if (object_put.body is null) = (object_put.raw is null) then
        raise exception 'the payload of an object is either text or bytes' using errcode = 'invalid_parameter_value';
    end if;
    if lease is not null then
        perform holdfast.object_fence(lease, lease_token);
    end if;
    -- Without a lock first: a refused write writes nothing, not even a row lock.
    select x.version into o.version from holdfast.object x where x.type = object_put.type and x.id = object_put.id;
    for attempt in 1..100 loop
        exit when not again and (condition = 'create' and o.version is not null or condition = 'match' and o.version is distinct from expected);
        select * into o from holdfast.object x where x.type = object_put.type and x.id = object_put.id for no key update;
        if again then
            select c.version into version from holdfast.object_change c where c.token = object_put.token;
            if found then
                status := 'done';
                labels := coalesce(labels, '{}');
                if o.version = version then  -- otherwise there was a newer write: return the values of this request
                    name := o.name;
                    labels := o.labels;
                end if;
                created_at := date_part('epoch', coalesce(o.created_at, clock_timestamp()));
                updated_at := date_part('epoch', case when o.version = version then o.updated_at else clock_timestamp() end);
                return;
            end if;
        end if;
        exit when condition = 'create' and o.version is not null or condition = 'match' and o.version is distinct from expected;
        number := epoch | nextval('holdfast.object_version');
        if o.version is not null then
            kind := 'updated';
            if rename then  -- a separate block, because its EXCEPTION clause costs a subtransaction
                begin
                    update holdfast.object x set name = object_put.name where x.type = object_put.type and x.id = object_put.id;
                exception when unique_violation then
                    kind := null;
                end;
            end if;
            if kind is not null then
                update holdfast.object x set body = object_put.body, raw = decode(object_put.raw, 'hex'), version = number,
                       labels = coalesce(object_put.labels::jsonb, x.labels), updated_at = clock_timestamp()
                 where x.type = object_put.type and x.id = object_put.id returning * into o;
            end if;
        else
            born := clock_timestamp();  -- created_at = updated_at
            insert into holdfast.object as x values (object_put.type, object_put.id, object_put.name, object_put.body, decode(object_put.raw, 'hex'),
                   coalesce(object_put.labels::jsonb, '{}'), number, born, born)
                on conflict do nothing returning * into o;
            if found then
                kind := 'created';
                -- If another number was drawn since ours, its writer may have created and deleted this object: ours must be higher.
                if pg_sequence_last_value('holdfast.object_version'::regclass) <> (number & 1099511627775) then
                    update holdfast.object x set version = epoch | nextval('holdfast.object_version')
                     where x.type = object_put.type and x.id = object_put.id returning * into o;
                end if;
            end if;
        end if;
        exit when kind is not null;
        select 'taken', x.id, x.version into status, owner, current from holdfast.object x
         where x.type = object_put.type and x.name = object_put.name and x.id <> object_put.id;
        if found then
            return;
        end if;
    end loop;
    if kind is null then
        status := case when condition = 'create' then 'exists' else 'conflict' end;
        current := o.version;
        return;
    end if;
    if late then
        perform holdfast.object_log_at_commit(o.version, o.type, o.id, kind, token);
    else
        perform holdfast.object_log(o.version, o.version, o.type, o.id, kind, token);
    end if;
    status := 'done';
    version := o.version;
    name := o.name;
    labels := o.labels;
    created_at := date_part('epoch', o.created_at);
    updated_at := date_part('epoch', o.updated_at);
end $$;

-- The most frequent write: a text payload at an expected version, not in the user's transaction. One statement without
-- calls; object_put handles every other case.
create function holdfast.object_swap(
    type text, id text, body text, expected bigint, token uuid, again boolean,
    out status text, out version bigint, out created_at double precision, out updated_at double precision, out name text,
    out labels jsonb, out current bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    watched boolean;
begin
    if not again then
        update holdfast.object x set body = object_swap.body, raw = null, updated_at = clock_timestamp(),
               version = (m.epoch_base + m.timeline) << 40 | nextval('holdfast.object_version')
          from holdfast.meta m
         where x.type = object_swap.type and x.id = object_swap.id and x.version = expected and m.home = 'holdfast.meta'::regclass
           and m.timeline = ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
        returning 'done', x.version, date_part('epoch', x.created_at), date_part('epoch', x.updated_at), x.name, x.labels
             into status, version, created_at, updated_at, name, labels;
        if found then
            insert into holdfast.object_change
            values (pg_current_xact_id(), version, version, object_swap.type, object_swap.id, 'updated', object_swap.token)
                returning exists (select from holdfast.object_watched w where w.until > clock_timestamp()) into watched;
            if version & 1023 = 0 then
                perform holdfast.object_trim(version);
            end if;
            if watched then
                perform pg_notify('holdfast.free', E'\x01objects');
            end if;
            return;
        end if;
    end if;
    select p.status, p.version, p.created_at, p.updated_at, p.name, p.labels, p.current
      into status, version, created_at, updated_at, name, labels, current
      from holdfast.object_put(object_swap.type, object_swap.id, object_swap.body, null, 'match', expected, false, null, null,
           object_swap.token, again, null, null, false) p;
end $$;

-- Write several objects of one type, each if it is at the expected version: [{"id", "body", "expected"}, ...]. Skips objects
-- that are locked or at another version, so it never waits while it holds locks. Returns the objects that it wrote.
create function holdfast.object_put_many(type text, records json, lease text, lease_token uuid)
returns table (id text, version bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    epoch bigint := holdfast.object_epoch() << 40;
    number int;
    latest bigint;
begin
    if lease is not null then
        perform holdfast.object_fence(lease, lease_token);
    end if;
    -- LATERAL looks each object up by its key; a plain join read all objects of the type.
    return query with locked as materialized (
        select x.place, r.body from json_to_recordset(records) r (id text, body text, expected bigint), lateral (
            select o.ctid as place from holdfast.object o
             where o.type = object_put_many.type and o.id = r.id and o.version = r.expected
             limit 1 for no key update skip locked) x
    ), written as (
        update holdfast.object x set body = l.body, raw = null, version = epoch | nextval('holdfast.object_version'), updated_at = clock_timestamp()
          from locked l where x.ctid = l.place returning x.id, x.version
    ), logged as (
        insert into holdfast.object_change
        select pg_current_xact_id(), w.version, w.version, object_put_many.type, w.id, 'updated', null from written w
    )
    select w.id, w.version from written w;
    get diagnostics number = row_count;
    latest := pg_sequence_last_value('holdfast.object_version'::regclass);
    if latest & 1023 < number then
        perform holdfast.object_trim(epoch | latest);
    end if;
    if exists (select from holdfast.object_watched w where w.until > clock_timestamp()) then
        perform pg_notify('holdfast.free', E'\x01objects');
    end if;
end $$;

-- status: done (version: of the deletion) | conflict (current: the object's version, NULL if there is no object).
create function holdfast.object_delete(
    type text, id text, expected bigint, token uuid, again boolean, lease text, lease_token uuid, late boolean,
    out status text, out version bigint, out current bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    epoch bigint := holdfast.object_epoch() << 40;
begin
    if lease is not null then
        perform holdfast.object_fence(lease, lease_token);
    end if;
    select x.version into current from holdfast.object x where x.type = object_delete.type and x.id = object_delete.id;
    if current is distinct from expected and not again then  -- a refused delete writes nothing
        status := 'conflict';
        return;
    end if;
    select x.version into current from holdfast.object x where x.type = object_delete.type and x.id = object_delete.id for update;
    if again then
        select 'done', c.version into status, version from holdfast.object_change c where c.token = object_delete.token;
        if found then
            return;
        end if;
    end if;
    if current is distinct from expected then
        status := 'conflict';
        return;
    end if;
    delete from holdfast.object x where x.type = object_delete.type and x.id = object_delete.id;
    version := epoch | nextval('holdfast.object_version');
    if late then
        perform holdfast.object_log_at_commit(version, object_delete.type, object_delete.id, 'deleted', token);
    else
        perform holdfast.object_log(version, version, object_delete.type, object_delete.id, 'deleted', token);
    end if;
    status := 'done';
end $$;

create function holdfast.object_get(type text, id text)
returns table (name text, body text, raw bytea, labels jsonb, version bigint, created_at double precision, updated_at double precision)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select x.name, x.body, x.raw, x.labels, x.version,
           date_part('epoch', x.created_at), date_part('epoch', x.updated_at)
      from holdfast.object x where x.type = object_get.type and x.id = object_get.id;
end $$;

create function holdfast.object_get_by_name(type text, name text)
returns table (id text, body text, raw bytea, labels jsonb, version bigint, created_at double precision, updated_at double precision)
language plpgsql rows 1 security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select x.id, x.body, x.raw, x.labels, x.version,
           date_part('epoch', x.created_at), date_part('epoch', x.updated_at)
      from holdfast.object x where x.type = object_get_by_name.type and x.name = object_get_by_name.name;
end $$;

-- Ordered by id, starting behind "after": inserts and deletes on earlier pages do not shift this one.
create function holdfast.object_list(type text, selector jsonb, after text, max_rows int)
returns table (id text, name text, body text, raw bytea, labels jsonb, version bigint, created_at double precision, updated_at double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_sort = off as $$
#variable_conflict use_column
begin
    return query select x.id, x.name, x.body, x.raw, x.labels, x.version,
           date_part('epoch', x.created_at), date_part('epoch', x.updated_at)
      from holdfast.object x
     where x.type = object_list.type and x.id > coalesce(after, '') and x.labels @> coalesce(selector, '{}')
     order by x.type, x.id limit max_rows;
end $$;

-- The cursor from which to watch every later commit, and the highest version.
create function holdfast.object_cursor(out cursor text, out version bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    epoch bigint := holdfast.object_epoch();
begin
    cursor := epoch || '/' || pg_current_snapshot()::text;
    version := epoch << 40 | coalesce(pg_sequence_last_value('holdfast.object_version'::regclass), 0);
end $$;

-- Changes committed between the snapshots "since" and "until" (default: now), with a place above "after". The page is
-- the last one if it has fewer than max_rows rows; it ends with a row without a version. expired: changes may be missing,
-- because some were trimmed, or the cursor is of another epoch, or it is ahead of this database, which was set back.
create function holdfast.object_changes(epoch bigint, since pg_snapshot, until pg_snapshot, after bigint, only_type text, max_rows int, listening boolean)
returns table (snapshot pg_snapshot, place bigint, version bigint, type text, id text, kind text, expired boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    upto pg_snapshot := coalesce(object_changes.until, pg_current_snapshot());
    number int;
begin
    if listening then  -- one row for all watchers, extended 5 s before it expires
        perform from holdfast.object_watched w where w.until > clock_timestamp() + interval '5 s';
        if not found then
            update holdfast.object_watched w set until = clock_timestamp() + interval '15 s'
             where w.one in (select x.one from holdfast.object_watched x for no key update skip locked);
        end if;
    end if;
    return query select upto, c.place, c.version, c.type, c.id, c.kind, false from (
        select x.* from holdfast.object_change x where x.xid >= pg_snapshot_xmax(since) and x.xid < pg_snapshot_xmax(upto)
        -- Transactions that were open in "since", by number: a range scan would read all changes since the oldest one every time.
        union all
        select x.* from holdfast.object_change x where x.xid = any (array(select pg_snapshot_xip(since)))) c
     where c.version >> 40 = epoch and c.place > coalesce(after, 0) and (only_type is null or c.type = only_type)
       and pg_visible_in_snapshot(c.xid, upto)
     order by c.place limit max_rows;
    get diagnostics number = row_count;
    -- Checked last: rows that are trimmed after this have been read.
    if epoch <> holdfast.object_epoch() or pg_snapshot_xmax(since) > pg_snapshot_xmax(pg_current_snapshot())
       or exists (select from holdfast.object_trimmed t where t.epoch = object_changes.epoch and t.xid >= pg_snapshot_xmin(since)) then
        return query select upto, null::bigint, null::bigint, null::text, null::text, null::text, true;
    elsif number < max_rows then
        return query select upto, null::bigint, null::bigint, null::text, null::text, null::text, false;
    end if;
end $$;

revoke all on function holdfast.object_trim(bigint), holdfast.object_log(bigint, bigint, text, text, text, uuid), holdfast.object_late(),
    holdfast.object_log_at_commit(bigint, text, text, text, uuid), holdfast.object_epoch(), holdfast.object_fence(text, uuid),
    holdfast.object_put_many(text, json, text, uuid),
    holdfast.object_swap(text, text, text, bigint, uuid, boolean),
    holdfast.object_put(text, text, text, text, text, bigint, boolean, text, text, uuid, boolean, text, uuid, boolean),
    holdfast.object_delete(text, text, bigint, uuid, boolean, text, uuid, boolean), holdfast.object_get(text, text),
    holdfast.object_get_by_name(text, text), holdfast.object_list(text, jsonb, text, int), holdfast.object_cursor(),
    holdfast.object_changes(bigint, pg_snapshot, pg_snapshot, bigint, text, int, boolean) from public;

insert into holdfast.schema_version (version, name) values (4, 'object');
