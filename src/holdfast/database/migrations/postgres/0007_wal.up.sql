-- Maintenance of the log of operations: verify chains, archive them, monitor them.

create index idempotency_log_expiring on holdfast.idempotency_log (expires_at) where result is not null and expires_at is not null;
create index idempotency_log_updated on holdfast.idempotency_log (updated_at);

-- The keys of a page of operations; "after" is the last key of the previous page. Includes keys that only one of the two
-- tables has: their rows were deleted from the other one.
create function holdfast.wal_keys(only_key text, since double precision, after text, max_rows int) returns table (key text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    begun timestamptz := to_timestamp(since);
    low text := coalesce(only_key, after, '');
    high text := coalesce(only_key, 'g');  -- above every hexadecimal digit
begin
    return query
    (select g.idem_key from holdfast.idempotency_log g
      where g.idem_key between low and high and g.idem_key is distinct from after and (begun is null or g.updated_at >= begun)
      order by 1 limit max_rows)
    union
    (select w.idem_key from holdfast.wal_more w
      where w.idem_key between low and high and w.idem_key is distinct from after and (begun is null or w.at >= begun)
      group by 1 order by 1 limit max_rows)
    order by 1 limit max_rows;
end $$;

-- The keys that were written last, in either table.
create function holdfast.wal_latest(max_rows int) returns table (key text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query
    (select g.idem_key from holdfast.idempotency_log g order by g.updated_at desc limit max_rows)
    union
    select w.idem_key from (select w.idem_key from holdfast.wal_more w order by w.horizon desc, w.place desc limit max_rows) w;
end $$;

-- The chains of these keys, with the log's row of each. keep: for how many seconds the result was to be stored.
create function holdfast.wal_chains(keys text[])
returns table (key text, number int, entries text, label text, status text, attempt int, pointer text, alive boolean, result text, result_hash text,
               fingerprint text, effect_started boolean, error text, failures int, fence bigint, owner text, rollback text, keep double precision,
               pipeline text, task text, dataset text, operation text, checksum text, params_hash text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query
    select k.key, w.number, w.entries, g.label, g.status, g.attempt, g.wal_pointer,
           coalesce(g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence), false),
           encode(g.result, 'hex'), g.result_hash, g.fingerprint, g.effect_started, g.error, g.failures, g.fence, g.owner, g.rollback,
           extract(epoch from g.expires_at - g.updated_at)::double precision,
           g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash
      from unnest(keys) k (key)  -- OFFSET 0 forces a lookup by key: a plan that reads the whole log is never better
      left join lateral (select * from holdfast.idempotency_log g where g.idem_key = k.key offset 0) g on true
      left join lateral (select * from holdfast.wal w where w.idem_key = k.key offset 0) w on true
     order by k.key collate "C", w.number;
end $$;

-- The operation that has a row of entries ending with this hash or, if that row is archived, continuing from it. Reads the
-- whole log: it is for interactive use, and an index would slow every operation down.
create function holdfast.wal_find(hash text) returns table (key text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query select w.idem_key from holdfast.wal w
     where right(w.entries, 67) = '"' || hash || '"]' or left(w.entries, 67) = '["' || hash || '"' limit 1;
end $$;

-- Places of archived rows: a cursor that stands on one is still valid.
create table holdfast.wal_archived (place bigint primary key);

-- Entries in the order of the commits, which is the same for every reader. A row is returned only when no open transaction
-- can come before it. "after" is the last row of the previous page; the answer begins with a row without a key. expired: this
-- database has not got that row, because it is another copy of the data or was set back.
create function holdfast.wal_read(in_space bigint, after_horizon xid8, after_place bigint, max_rows int, max_bytes bigint default null)
returns table (space bigint, expired boolean, horizon xid8, place bigint, key text, entries text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    space := holdfast.current_space();
    expired := coalesce(in_space, space) is distinct from space or after_place is not null
        and not exists (select from holdfast.wal w where (w.horizon, w.place) = (after_horizon, after_place))
        and not exists (select from holdfast.wal_archived a where a.place = after_place);
    return next;
    if not expired then
        return query select null::bigint, false, r.horizon, r.place, r.idem_key, r.entries
          from (
            select page.*, row_number() over steps as row, sum(octet_length(page.entries)) over steps as bytes
              from (
                select w.horizon, w.place, w.idem_key, w.entries from holdfast.wal w
                 where (after_place is null or (w.horizon, w.place) > (after_horizon, after_place))
                   and w.horizon < pg_snapshot_xmin(pg_current_snapshot())
                 order by w.horizon, w.place limit max_rows) page
            window steps as (order by page.horizon, page.place)) r
         where wal_read.max_bytes is null or r.row = 1 or r.bytes <= wal_read.max_bytes
         order by r.horizon, r.place;
    end if;
end $$;

-- The rows of a restored dump carry transaction ids of another cluster: move them before all rows of this one, in the same order.
create function holdfast.wal_settle() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    with o as materialized (
        select w.idem_key, w.number, row_number() over (order by w.horizon, w.place) as place from holdfast.wal w),
    first as (
        update holdfast.idempotency_log g set horizon = '0', place = o.place from o
         where o.idem_key = g.idem_key and o.number = 1 and g.entries is not null)
    update holdfast.wal_more m set horizon = '0', place = o.place from o where o.idem_key = m.idem_key and o.number = m.number;
    delete from holdfast.wal_archived;
    return null;
end $$;
create trigger wal_settle after update on holdfast.space for each row execute function holdfast.wal_settle();

-- For operators: delete expired results. The operation stays done, and the hash of its result stays.
create function holdfast.operation_expire(max_rows int, actor text, reason text, out gone int)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    at timestamptz := clock_timestamp();
begin
    perform holdfast.audit_check(actor, reason);
    update holdfast.idempotency_log g set result = null where g.idem_key in (
        select e.idem_key from holdfast.idempotency_log e where e.result is not null and e.expires_at <= at
         order by e.expires_at limit max_rows for update skip locked);
    get diagnostics gone = row_count;
    if gone > 0 then
        perform holdfast.audit_act('operation_expire', 'expired results', actor, reason, null, jsonb_build_object('results', gone));
    end if;
end $$;

-- relayed: whether a relay was ever run. If not, unrelayed is the number of rows with lineage for one, and unrelayed_for the age of the first.
-- Never reads the whole log: unfinished, expired and unpublished rows have an index, and beyond "enough" rows the total is the
-- server's estimate. An operation that was reset (its error names the actor) is not counted as failed.
create function holdfast.operation_health(stale double precision, enough int,
    out operations bigint, out partial bigint, out orphaned bigint, out stale_partials bigint, out oldest double precision, out failed bigint,
    out today bigint, out bytes bigint, out expired bigint, out unpublished bigint, out lag double precision, out reviews bigint,
    out relayed boolean, out unrelayed bigint, out unrelayed_for double precision, out now double precision)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    at timestamptz := clock_timestamp();  -- a variable: a volatile function in the condition would prevent an index scan
begin
    select count(*) filter (where g.status = 'partial'), count(*) filter (where g.status = 'partial' and not g.alive),
           count(*) filter (where g.status = 'partial' and not g.alive and g.updated_at < at - make_interval(secs => stale)),
           extract(epoch from at - min(g.updated_at) filter (where g.status = 'partial' and not g.alive)),
           count(*) filter (where g.status = 'failure' and g.error not like '%"actor": %')
      into partial, orphaned, stale_partials, oldest, failed
      from (select l.status, l.updated_at, l.error,
                   l.status = 'partial' and l.owner is not null and holdfast.operation_alive(l.owner, l.fence) as alive
              from holdfast.idempotency_log l where l.status <> 'success' order by l.updated_at limit enough) g;
    select count(*) into operations from (select from holdfast.idempotency_log l limit enough) l;
    if operations = enough then
        select greatest(operations, c.reltuples::bigint) into operations from pg_class c where c.oid = 'holdfast.idempotency_log'::regclass;
    end if;
    select count(*) into today from (
        select from holdfast.idempotency_log l where l.updated_at > at - interval '1 day' order by l.updated_at limit 10 * enough) l;
    select count(*) into expired from (
        select from holdfast.idempotency_log l where l.result is not null and l.expires_at <= at limit enough) l;
    bytes := pg_total_relation_size('holdfast.wal_more') + pg_total_relation_size('holdfast.idempotency_log');
    select count(*), extract(epoch from at - min(o.created_at)) into unpublished, lag from holdfast.outbox o where o.published_at is null;
    select count(*) into reviews from holdfast.review_now r where r.status = 'open';
    relayed := exists (select from holdfast.relay) or exists (select from holdfast.audit a where a.action = 'relay_remove');
    if not relayed then
        select count(*), extract(epoch from at - min(w.written)) into unrelayed, unrelayed_for
          from (select x.at as written from holdfast.wal x order by x.horizon, x.place limit enough) w;
    end if;
    now := extract(epoch from at);
end $$;

-- How many operations were last changed in each bucket, by status, among the latest max_rows. Rows without a bucket: as those of lease_activity.
create function holdfast.operation_activity(step double precision, buckets integer, max_rows integer)
returns table (bucket integer, kind text, value double precision)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    start double precision := holdfast.activity_start(step, buckets);
    begun timestamptz := to_timestamp(start);
begin
    return query select null::integer, 'start', start;
    return query select null::integer, 'complete', extract(epoch from g.updated_at)::double precision
      from holdfast.idempotency_log g where g.updated_at >= begun order by g.updated_at desc offset max_rows - 1 limit 1;
    return query
    select floor((extract(epoch from e.updated_at) - start) / step)::integer, e.status, count(*)::double precision
      from (select g.updated_at, g.status from holdfast.idempotency_log g
             where g.updated_at >= begun order by g.updated_at desc limit max_rows) e
     group by 1, 2;
end $$;

-- The valid indexes on the tables of operations.
create function holdfast.operation_indexes() returns table (name text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query select c.relname::text from pg_index i join pg_class c on c.oid = i.indexrelid
     where i.indisvalid and i.indisready and i.indrelid in ('holdfast.idempotency_log'::regclass, 'holdfast.wal_more'::regclass,
           'holdfast.outbox'::regclass, 'holdfast.review'::regclass);
end $$;

revoke all on function holdfast.wal_keys(text, double precision, text, int), holdfast.wal_latest(int), holdfast.wal_chains(text[]),
    holdfast.wal_find(text), holdfast.wal_read(bigint, xid8, bigint, int, bigint), holdfast.wal_settle(),
    holdfast.operation_expire(int, text, text), holdfast.operation_health(double precision, int),
    holdfast.operation_activity(double precision, integer, integer), holdfast.operation_indexes() from public;

insert into holdfast.schema_version (version, name) values (7, 'wal');
