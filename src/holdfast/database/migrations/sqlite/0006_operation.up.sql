-- Operations that take effect once: the status of each, and its log. There is one writer at a time, so a transaction needs no
-- lock of its own.

create table holdfast_idempotency_log (
    idem_key       text primary key,
    pipeline_id    text,
    task_id        text,
    dataset_id     text,
    operation_type text,
    status         text not null check (status in ('success', 'failure', 'partial', 'undone')),
    result_hash    text,
    created_at     real not null,
    updated_at     real not null,
    raw_checksum   text,
    params_hash    text,
    wal_pointer    text not null,
    fingerprint    text,
    result         text,
    attempt        integer not null,
    fence          integer not null,
    error          text,
    expires_at     real,
    label          text not null,
    owner          text,
    rollback       text,
    effect_started integer not null,
    failures       integer not null,
    entries        text,
    place          integer not null
);
create index holdfast_idempotency_log_unfinished on holdfast_idempotency_log (updated_at) where status <> 'success';
create index holdfast_idempotency_log_kin on holdfast_idempotency_log (dataset_id, operation_type, raw_checksum, params_hash)
 where dataset_id is not null;

create index holdfast_idempotency_log_order on holdfast_idempotency_log (place) where entries is not null;

-- Entries that are written together share one row: a JSON text, and the number of its first entry. Those that create an operation
-- are in its own row, because nearly every operation is written once; later ones are here. The view wal has both. Readers order
-- rows by place: there is one writer at a time, so that is the order of the commits.
create table holdfast_wal_more (
    place    integer primary key,
    idem_key text not null,
    number   integer not null,
    at       real not null,
    entries  text not null,
    unique (idem_key, number)
);

create view holdfast_wal as
select place, idem_key, 1 as number, created_at as at, entries from holdfast_idempotency_log where entries is not null
union all
select place, idem_key, number, at, entries from holdfast_wal_more;

create view holdfast_place as
select max((select micros from holdfast_clock), coalesce((select max(place) + 1 from holdfast_idempotency_log where entries is not null), 0),
           coalesce((select max(place) + 1 from holdfast_wal_more), 0)) as next;

create table holdfast_outbox (
    id           integer primary key,
    idem_key     text not null,
    attempt      integer not null,
    topic        text not null,
    payload      text not null,
    created_at   real not null,
    published_at real
);
create index holdfast_outbox_unpublished on holdfast_outbox (idem_key) where published_at is null;

-- Versions of the policy: the last one is in force. The library checks it.
create table holdfast_policy (
    version    integer primary key,
    applied_at real not null,
    actor      text not null,
    reason     text not null,
    datasets   text not null
);

create table holdfast_review (
    id             integer primary key,
    idem_key       text not null,
    label          text not null,
    dataset_id     text,
    operation_type text,
    reason         text not null check (reason in ('attempts', 'locked', 'policy')),
    detail         text not null,
    opened_at      real not null,
    closed_at      real,
    actor          text,
    outcome        text check (outcome in ('approved', 'rejected', 'reset', 'done')),
    answer         text,
    spent_at       real,
    asked_by       text,
    attempt        integer,
    fingerprint    text,
    outputs        text,
    four_eyes      integer not null default 0,
    taken          text,
    pointer        text
);
create unique index holdfast_review_open on holdfast_review (idem_key, reason) where closed_at is null;
create index holdfast_review_standing on holdfast_review (idem_key) where spent_at is null;

create view holdfast_review_now as
select r.*, coalesce(r.outcome, (select 'done' from holdfast_idempotency_log g
                                  where g.idem_key = r.idem_key and g.status = 'success' and (g.updated_at >= r.opened_at or r.reason <> 'policy' and coalesce(g.expires_at > r.opened_at, true))), 'open') as status
  from holdfast_review r;

create view holdfast_operation as
select g.*, g.rowid as begun, json_array(pipeline_id, task_id, dataset_id, operation_type, raw_checksum, params_hash) as origin, g.status = 'partial' and exists (select 1 from holdfast_live v where v.name = g.owner and v.fence = g.fence) as alive
  from holdfast_idempotency_log g;

insert into holdfast_schema_version (version, name) values (6, 'operation');
