-- Relays publish the log. The cursor of each is stored here, beside the log, and moves only under the lease of that relay: a
-- superseded relay cannot move it, and after a failover or a restore cursor and log still match.

create table holdfast.relay (
    name       text collate "C" primary key,
    horizon    xid8 not null,
    place      bigint not null,
    told       bigint not null,
    fence      bigint not null,
    moved_at   timestamptz not null,
    problem    text,
    since      timestamptz,
    tries      text not null default '{}',
    taken      text,
    check ((problem is null) = (since is null))
);
comment on column holdfast.relay.problem is 'why the sink accepts nothing at present';
comment on column holdfast.relay.told is 'events that the sink accepted; an event that was sent twice counts twice';
comment on column holdfast.relay.tries is 'by event, the failed tries since the cursor last moved, including those that a crash cut short';
comment on column holdfast.relay.taken is 'an event that the sink accepted recently: a healthy sink accepts it again';

-- Events that a sink refused although it accepts others.
create table holdfast.parked (
    relay     text collate "C" not null references holdfast.relay on delete cascade,
    id        text collate "C" not null,
    idem_key  text collate "C" not null,
    event     text not null,
    problem   text not null,
    tries     int not null,
    parked_at timestamptz not null,
    again     boolean not null default false,
    primary key (relay, id)
);
comment on column holdfast.parked.again is 'an operator has asked for a retry';
create index parked_key on holdfast.parked (idem_key);
create index outbox_key on holdfast.outbox (idem_key);

-- Rows of the log in the order of wal_read, each with everything its events need: the log's columns, the earlier entries of the
-- operation if one ends here, and its outbox.
create function holdfast.relay_read(after_horizon xid8, after_place bigint, max_rows int)
returns table (horizon xid8, place bigint, key text, number int, entries text, before text, outbox text, label text, pipeline text,
               task text, dataset text,
               operation text, checksum text, params_hash text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select w.horizon, w.place, w.idem_key, w.number, w.entries,
           case when w.number > 1 and w.entries ~ '"(success|failure|rollback|reset)"' then
               (select json_agg(b.entries order by b.number)::text from holdfast.wal b where b.idem_key = w.idem_key and b.number < w.number) end,
           case when w.entries like '%"success"%' then
               (select json_agg(json_build_array(o.attempt, o.topic, o.payload) order by o.id)::text
                  from holdfast.outbox o where o.idem_key = w.idem_key) end,
           g.label, g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash
      from holdfast.wal w left join holdfast.idempotency_log g on g.idem_key = w.idem_key
     where (after_place is null or (w.horizon, w.place) > (after_horizon, after_place))
       and w.horizon < pg_snapshot_xmin(pg_current_snapshot())
     order by w.horizon, w.place limit max_rows;
end $$;

-- The lease under which a relay runs, '@relay:…'. Arguments and answers are those of lease_acquire; there is no re-entry.
create function holdfast.relay_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    at_least_seconds double precision default 0, solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_take('relay', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
end $$;

-- The cursor of the relay; a new relay starts at the beginning. lag: the age of the first unpublished row, even if relay_read
-- does not return it yet because an open transaction may come before it.
create function holdfast.relay_open(name text, lease text, token uuid, out horizon xid8, out place bigint, out tries text, out taken text,
    out lag double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    perform holdfast.object_fence(lease, case when lease = '@relay:' || relay_open.name then token end);
    insert into holdfast.relay (name, horizon, place, told, fence, moved_at) values (relay_open.name, '0', 0, 0, 0, clock_timestamp())
        on conflict do nothing;
    select r.horizon, r.place, r.tries, r.taken into horizon, place, tries, taken from holdfast.relay r where r.name = relay_open.name;
    select extract(epoch from clock_timestamp() - w.at) into lag from holdfast.wal w
     where (w.horizon, w.place) > (relay_open.horizon, relay_open.place)
     order by w.horizon, w.place limit 1;
end $$;

-- Record the tries before the sink is called.
create function holdfast.relay_begin(name text, lease text, token uuid, tries text)
returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.object_fence(lease, case when lease = '@relay:' || relay_begin.name then token end);
    update holdfast.relay r set tries = relay_begin.tries where r.name = relay_begin.name;
end $$;

-- Move the cursor: everything up to it is published or parked. moved: false if the relay was removed, or if the database was set
-- back meanwhile and has lost the row at the cursor. ended: [[key, attempt], …] whose outbox is fully published;
-- parked: [[id, key, event, problem, tries], …]; freed: ids of parked events that the sink accepted. problem: why the relay is stuck.
create function holdfast.relay_move(name text, lease text, token uuid, fence bigint, horizon xid8, place bigint, told bigint, ended text, parked text,
    freed text, problem text, tries text, taken text, out moved boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
    perform holdfast.object_fence(lease, case when lease = '@relay:' || relay_move.name then token end);
    update holdfast.relay r set horizon = relay_move.horizon, place = relay_move.place, told = r.told + relay_move.told, fence = relay_move.fence,
           moved_at = case when (r.horizon, r.place) = (relay_move.horizon, relay_move.place) then r.moved_at else clock_timestamp() end,
           problem = relay_move.problem, tries = relay_move.tries, taken = coalesce(relay_move.taken, r.taken),
           since = case when relay_move.problem is not null then coalesce(r.since, clock_timestamp()) end
     where r.name = relay_move.name and ((r.horizon, r.place) = (relay_move.horizon, relay_move.place)
           or exists (select from holdfast.wal w where (w.horizon, w.place) = (relay_move.horizon, relay_move.place)));
    moved := found;
    if not moved then
        return;
    end if;
    update holdfast.outbox o set published_at = clock_timestamp() from json_array_elements(ended::json) e
     where o.published_at is null and o.idem_key = e ->> 0 and o.attempt <= (e ->> 1)::int;
    delete from holdfast.parked p using json_array_elements_text(freed::json) f where p.relay = relay_move.name and p.id = f;
    insert into holdfast.parked
    select relay_move.name, e ->> 0, e ->> 1, e ->> 2, e ->> 3, (e ->> 4)::int, clock_timestamp(), false from json_array_elements(parked::json) e
        on conflict (relay, id) do update set problem = excluded.problem, tries = holdfast.parked.tries + excluded.tries, again = false;
end $$;

-- Counts at most 100,000 rows of a backlog.
create function holdfast.relay_list()
returns table (name text, told bigint, fence bigint, moved_at double precision, problem text, since double precision, holder text, parked bigint,
               entries bigint, lag double precision, cursor text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select r.name, r.told, r.fence, extract(epoch from r.moved_at)::double precision, r.problem,
           extract(epoch from r.since)::double precision,
           (select l.holder from holdfast.lease l join holdfast.beat b on b.id = l.beat
             where l.name = '@relay:' || r.name and not b.dead and b.expires_at > clock_timestamp()),
           (select count(*) from holdfast.parked p where p.relay = r.name), w.waiting, coalesce(w.lag, 0), r.horizon || '/' || r.place
      from holdfast.relay r cross join lateral (
           select count(*) as waiting, extract(epoch from clock_timestamp() - min(b.at))::double precision as lag
             from (select x.at from holdfast.wal x where (x.horizon, x.place) > (r.horizon, r.place) order by x.horizon, x.place limit 100000) b) w
     order by 1;
end $$;

create function holdfast.relay_parked(name text, only_again boolean, max_rows int)
returns table (id text, key text, event text, problem text, tries int, parked_at double precision, again boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select p.id, p.idem_key, p.event, p.problem, p.tries, extract(epoch from p.parked_at)::double precision, p.again
      from holdfast.parked p where p.relay = relay_parked.name and (p.again or not only_again) order by p.parked_at, p.id limit max_rows;
end $$;

-- Ask the relay to retry one parked event, or all of them.
create function holdfast.relay_retry(name text, id text, out asked int)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    update holdfast.parked p set again = true where p.relay = relay_retry.name and (relay_retry.id is null or p.id = relay_retry.id);
    get diagnostics asked = row_count;
end $$;

-- For operators: remove a relay. It never publishes the rest, and archiving no longer waits for it.
create function holdfast.relay_remove(name text, actor text, reason text, out removed int)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    reached text;
begin
    delete from holdfast.relay r where r.name = relay_remove.name returning r.horizon || '/' || r.place into reached;
    get diagnostics removed = row_count;
    if removed > 0 then
        perform holdfast.audit_act('relay_remove', name, actor, reason, null, jsonb_build_object('cursor', reached));
    end if;
end $$;

-- Runs before wal_settle renumbers the rows of a restored log.
create function holdfast.relay_settle() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.relay r set horizon = '0', place = (select count(*) from holdfast.wal w where (w.horizon, w.place) <= (r.horizon, r.place));
    return null;
end $$;
create trigger relay_settle after update on holdfast.space for each row execute function holdfast.relay_settle();

-- For operators: replace the chain of an operation by one row that says it is archived; the caller has stored the entries elsewhere.
-- state: archived | unpublished (its lineage is not published yet) | changed (it is running, or "expected" is not its end).
create function holdfast.wal_archive(key text, expected text, pointer text, number int, entries text, actor text, reason text, out state text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    last record;
    label text;
begin
    perform holdfast.audit_check(actor, reason);
    perform holdfast.wal_ready();
    update holdfast.idempotency_log g set wal_pointer = pointer where g.idem_key = key and g.wal_pointer = expected and g.status <> 'partial'
    returning g.label into label;
    if not found then  -- perhaps a repeated request whose first reply was lost
        state := case when exists (select from holdfast.idempotency_log g where g.idem_key = key and g.wal_pointer = pointer)
                      then 'archived' else 'changed' end;
        return;
    end if;
    select * into last from holdfast.wal w where w.idem_key = key order by w.number desc limit 1;
    if exists (select from holdfast.outbox o where o.idem_key = key and o.published_at is null)
       or exists (select from holdfast.relay r where (r.horizon, r.place) < (last.horizon, last.place))
       or exists (select from holdfast.parked p where p.idem_key = key) then
        update holdfast.idempotency_log g set wal_pointer = expected where g.idem_key = key;
        state := 'unpublished';
    else
        insert into holdfast.wal_archived select w.place from holdfast.wal w where w.idem_key = key;
        delete from holdfast.wal_more m where m.idem_key = key;
        update holdfast.idempotency_log g set entries = null where g.idem_key = key;
        delete from holdfast.outbox o where o.idem_key = key;
        insert into holdfast.wal_more values (key, number, clock_timestamp(), entries);
        perform holdfast.audit_act('wal_archive', left(label, 200), actor, reason, null, jsonb_build_object('key', key, 'pointer', expected));
        state := 'archived';
    end if;
end $$;

revoke all on function holdfast.relay_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
    holdfast.relay_read(xid8, bigint, int), holdfast.relay_open(text, text, uuid),
    holdfast.relay_begin(text, text, uuid, text),
    holdfast.relay_move(text, text, uuid, bigint, xid8, bigint, bigint, text, text, text, text, text, text), holdfast.relay_list(),
    holdfast.relay_parked(text, boolean, int), holdfast.relay_retry(text, text), holdfast.relay_remove(text, text, text), holdfast.relay_settle(),
    holdfast.wal_archive(text, text, text, int, text, text, text) from public;

insert into holdfast.schema_version (version, name) values (8, 'relay');
