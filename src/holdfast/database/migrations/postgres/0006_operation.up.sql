-- Operations that take effect once: the status of each, and its log.
--
-- Every change of an operation is one call of operation_write. The caller passes the end of the chain that it has read, and
-- the write is refused if the chain has grown since. So no process overwrites an entry that it has not read, even if locks
-- or leases fail; in addition, the lease's fence refuses a late owner. Whether an unfinished operation is running does not
-- depend on a timeout: its transaction holds the advisory lock, or its lease is alive.

create table holdfast.idempotency_log (
    idem_key       text collate "C" primary key,
    pipeline_id    text,
    task_id        text,
    dataset_id     text collate "C",
    operation_type text collate "C",
    status         text not null check (status in ('success', 'failure', 'partial', 'undone')),
    result_hash    text,
    created_at     timestamptz not null,
    updated_at     timestamptz not null,
    raw_checksum   text collate "C",
    params_hash    text collate "C",
    wal_pointer    text not null,
    fingerprint    text,
    result         bytea,
    attempt        int not null,
    fence          bigint not null,
    error          text,
    expires_at     timestamptz,
    label          text not null,
    owner          text,
    rollback       text,
    effect_started boolean not null,
    failures       int not null,
    constraint key_has_1_to_200_characters_and_no_control_character check (length(idem_key) between 1 and 200 and idem_key !~ '[[:cntrl:]]'),
    constraint fields_are_short check (octet_length(label) <= 16384 and octet_length(wal_pointer) <= 16384
        and (error is null or octet_length(error) <= 16384) and (rollback is null or octet_length(rollback) <= 16384)
        and (pipeline_id is null or octet_length(pipeline_id) <= 16384) and (task_id is null or octet_length(task_id) <= 16384)
        and (result_hash is null or octet_length(result_hash) <= 16384)),
    constraint expires_before_the_year_9000 check (expires_at between '2000-01-01' and '9000-01-01'),
    entries        text,
    horizon        xid8 not null default greatest(pg_current_xact_id(), (pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1)::text::xid8),
    place          bigint not null default nextval('holdfast.place')
) with (fillfactor = 80);
comment on column holdfast.idempotency_log.label is 'readable name: the key may be a hash';
comment on column holdfast.idempotency_log.owner is 'the lease of the last attempt; null if the attempt ran in a transaction';
comment on column holdfast.idempotency_log.rollback is 'the name of the function that undoes it';
comment on column holdfast.idempotency_log.effect_started is 'the last attempt may have had an effect that has not been undone';
comment on column holdfast.idempotency_log.failures is 'failed attempts since it was begun, done or reset';
comment on column holdfast.idempotency_log.entries is 'the entries that were written with the row, see the view wal; null if they are in wal_more, or archived';
create index idempotency_log_unfinished on holdfast.idempotency_log (updated_at) where status <> 'success';
create index idempotency_log_kin on holdfast.idempotency_log (dataset_id, operation_type, raw_checksum, params_hash) where dataset_id is not null;

create index idempotency_log_order on holdfast.idempotency_log (horizon, place) where entries is not null;

-- Entries that are written together share one row: a JSON text, and the number of its first entry. Those that create an operation
-- are in its own row, because nearly every operation is written once; later ones are here. The view wal has both.
-- Readers order rows by (horizon, place), which is the order of the commits: a row that was committed before another
-- transaction's COMMIT began comes first. The horizon is at least the row's own transaction and every transaction that had
-- ended when it was drawn. So no reader gets past a row that is not committed yet, and a row is readable as soon as it is
-- committed. The place, drawn at the same time, orders rows of one horizon. A statement that is sent together with its
-- COMMIT draws both itself; other rows wait for their COMMIT in wal_late.
create table holdfast.wal_more (
    idem_key text collate "C" not null,
    number   int not null,
    at       timestamptz not null,
    entries  text not null,
    horizon  xid8 not null default greatest(pg_current_xact_id(), (pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1)::text::xid8),
    place    bigint not null default nextval('holdfast.place'),
    primary key (idem_key, number)
);
create index wal_more_order on holdfast.wal_more (horizon, place);

create view holdfast.wal as
select g.idem_key, 1 as number, g.created_at as at, g.entries, g.horizon, g.place from holdfast.idempotency_log g where g.entries is not null
union all
select m.idem_key, m.number, m.at, m.entries, m.horizon, m.place from holdfast.wal_more m;

-- Before rows of the log are written: their places rise, as fences do, and in another copy of the data the rows that are there
-- have been renumbered. The rows then draw their places with nextval.
create function holdfast.wal_ready() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    -- hot: the check of draw(), inlined
    perform from holdfast.meta m, holdfast.space s
      where pg_sequence_last_value('holdfast.place') >= (date_part('epoch', clock_timestamp()) - 1767225600) * 1000000 - 1000000
        and pg_sequence_last_value('holdfast.raised_for') = hash_record_extended(row(pg_postmaster_start_time(), pg_relation_filepath('holdfast.raised_for'), m.xmin), 0)
        and s.copy = hash_record_extended(row(pg_relation_filepath('holdfast.raised_for'), m.xmin), 0);
    if not found then
        begin
            perform holdfast.current_space();
        exception when serialization_failure then
            null;  -- under repeatable read: another transaction has begun the space since this one's snapshot was taken
        end;
        perform holdfast.draw('holdfast.place');
    end if;
end $$;

-- Rows of a transaction that continues after them, until its COMMIT; also of a repeatable read or serializable transaction,
-- whose snapshot does not show which transactions have ended since. The table itself is always empty.
create unlogged table holdfast.wal_late (
    idem_key text collate "C" not null,
    number   int not null,
    at       timestamptz not null,
    entries  text not null,
    asked    timestamptz
);
comment on column holdfast.wal_late.asked is 'start of the command that fired the trigger: COMMIT, or SET CONSTRAINTS, which does not commit';

create function holdfast.wal_late() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
declare
    own bigint := pg_current_xact_id()::text::bigint;
    drawn bigint;
begin
    -- COMMIT fires triggers until none is deferred, SET CONSTRAINTS does not.
    if new.asked is distinct from statement_timestamp() then
        set constraints holdfast.wal_late deferred;
        update holdfast.wal_late l set asked = statement_timestamp() where l.ctid = new.ctid;
        return null;
    end if;
    begin  -- a subtransaction: it gets its number with its first write, independent of the snapshot
        delete from holdfast.wal_late l where l.ctid = new.ctid returning l.xmax::text::bigint into drawn;
    exception when assert_failure then  -- never raised: the EXCEPTION clause makes the block a subtransaction
        raise;
    end;
    insert into holdfast.wal_more values (new.idem_key, new.number, new.at, new.entries, (own + (drawn - own & 4294967295))::text::xid8);
    return null;
end $$;

create constraint trigger wal_late after insert or update on holdfast.wal_late
    deferrable initially deferred for each row execute function holdfast.wal_late();
alter table holdfast.wal_late enable always trigger wal_late;  -- without it, session_replication_role = replica would disable the log

-- Events to publish, written in the transaction of the effect.
create table holdfast.outbox (
    id           bigint generated always as identity primary key,
    idem_key     text collate "C" not null,
    attempt      int not null,
    topic        text not null,
    payload      text not null,
    created_at   timestamptz not null,
    published_at timestamptz
);
create index outbox_unpublished on holdfast.outbox (idem_key) where published_at is null;

-- Versions of the policy: the last one is in force, and is checked by policy_check().
create table holdfast.policy (
    version    bigint primary key,
    applied_at timestamptz not null default clock_timestamp(),
    actor      text not null,
    role       text not null,
    reason     text not null,
    datasets   jsonb not null
);
comment on column holdfast.policy.datasets is 'declarations by pattern of datasets';

-- Decisions that an operator has to make.
create table holdfast.review (
    id             bigint generated always as identity primary key,
    idem_key       text collate "C" not null,
    label          text not null,
    dataset_id     text,
    operation_type text,
    reason         text collate "C" not null check (reason in ('attempts', 'locked', 'policy')),
    detail         text not null,
    opened_at      timestamptz not null,
    closed_at      timestamptz,
    actor          text,
    outcome        text check (outcome in ('approved', 'rejected', 'reset', 'done')),
    answer         text,
    spent_at       timestamptz,
    asked_by       text,
    attempt        int,
    fingerprint    text,
    outputs        text,
    four_eyes      boolean not null default false,
    taken          bytea,
    pointer        text,
    constraint fields_are_short check (octet_length(label) <= 16384 and octet_length(detail) <= 16384 and octet_length(outputs) <= 65536
        and octet_length(concat(dataset_id, operation_type, asked_by, fingerprint)) <= 65536)
);
comment on column holdfast.review.asked_by is 'the actor of the operation that it was opened for';
comment on column holdfast.review.attempt is 'the attempt that used the approval, if the stored policy asks for one';
comment on column holdfast.review.fingerprint is 'of its payload; an approval holds for this, the actor and the outputs';
comment on column holdfast.review.outputs is 'the datasets that it declares to write, as JSON';
comment on column holdfast.review.four_eyes is 'the actor who asked must not approve it';
comment on column holdfast.review.taken is 'hash of a token that the run drew which took the approval';
comment on column holdfast.review.pointer is 'the end of the log of the operation when the approval was taken';
comment on column holdfast.review.spent_at is 'of an approval, when it was used; of a rejection, when a reset lifted it';
create unique index review_open on holdfast.review (idem_key, reason) where closed_at is null;
create index review_standing on holdfast.review (idem_key) where spent_at is null;

-- Reviews with their status: a review is done if the operation has succeeded since it was opened, or was a success by then, which a
-- caller that was about to be refused did not see yet. Not so for reason "policy": a policy may ask for a review of a success.
create view holdfast.review_now as
select r.*, coalesce(r.outcome, (select 'done' from holdfast.idempotency_log g
                                  where g.idem_key = r.idem_key and g.status = 'success' and (g.updated_at >= r.opened_at or r.reason <> 'policy' and coalesce(g.expires_at > r.opened_at, true))), 'open') as status
  from holdfast.review r;

-- Whether the lease is held, with that fence if one is given. Stable: it reads by the snapshot of the statement that read the
-- log. By a later one the lease of an owner that has ended meanwhile is gone, although the row still says partial, and a
-- living owner would be taken for dead.
create function holdfast.operation_alive(lease text, fence bigint) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return exists (select from holdfast.lease l join holdfast.beat b on b.id = l.beat
                    where l.name = lease and (operation_alive.fence is null or l.fence = operation_alive.fence)
                      and not b.dead and b.expires_at > holdfast.snapshot_time());
end $$;

-- True, or HF007: another operation is claimed, ended or replayed under the key of this one. An operation belongs to the pipeline, task,
-- dataset, operation, checksum and params_hash of its first claim, the "origin" in answers: its policy and its lock follow from these.
create function holdfast.operation_is_of(
    g holdfast.idempotency_log, pipeline text, task text, dataset text, operation text, checksum text, params_hash text) returns boolean
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if (g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)
       is distinct from (pipeline, task, dataset, operation, checksum, params_hash) then
        raise exception 'key % belongs to another operation, %', g.idem_key, quote_literal(g.label)
            using errcode = 'HF007', detail = json_build_array(g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)::text,
                  hint = 'A new operation needs a new key. A retry has the pipeline, task, dataset, operation, checksum and parameters of the first attempt.';
    end if;
    return true;
end $$;

-- Whether a recorded error, JSON, has the field "reset". As text: an error may hold what PostgreSQL does not take as JSON.
create function holdfast.says_reset(error text) returns boolean
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return coalesce(error ~ E'"(r|\\\\u0072)(e|\\\\u0065)(s|\\\\u0073)(e|\\\\u0065)(t|\\\\u0074)"\\s*:', false);
end $$;

-- The count of failed attempts after a write, if it follows from the row: else 42501. An attempt that failed counts, and one that was not
-- ended by its owner when another attempt begins. A success ends the count, and so does the time for which it is kept; else
-- only operation_correct sets it back. An owner may also say that its attempt was interrupted, or that it only recovers one: it counts less then.
create function holdfast.operation_count(g holdfast.idempotency_log, label text, status text, attempt int, fence bigint, failures int) returns int
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    counted int := case when g.idem_key is null or g.status <> 'partial' and coalesce(g.expires_at <= clock_timestamp(), false)
                          or holdfast.says_reset(g.error) then 0 else g.failures end;
    dead int := (g.status is not distinct from 'partial' and (g.fence <> fence or fence = 0))::int;
    least_count int := case status when 'success' then 0 when 'failure' then counted + dead + 1 when 'undone' then counted + dead
                                   else counted + case when attempt > g.attempt then dead else 0 end end;
    most int := case status when 'success' then 0 when 'failure' then least_count when 'undone' then counted + 1 else counted + dead end;
begin
    if failures is null or failures not between least_count and most then
        raise exception 'operation % has % failed attempts after this write, not %', quote_literal(label), least_count, coalesce(failures::text, 'NULL')
            using errcode = 'insufficient_privilege', hint = 'A success ends the count, and operation_correct sets it back.';
    end if;
    return failures;
end $$;

-- The state of an operation. The result is hex, so that every database driver returns the same. Stable, as operation_alive is.
create function holdfast.operation_get(key text,
    out status text, out fingerprint text, out result text, out result_hash text, out error text, out attempt int, out fence bigint,
    out pointer text, out rollback text, out effect_started boolean, out failures int, out alive boolean, out expired boolean,
    out now double precision, out policy bigint, out origin text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    holder text;
begin
    select g.status, g.fingerprint, encode(g.result, 'hex'), g.result_hash, g.error, g.attempt, g.fence, g.wal_pointer, g.rollback, g.effect_started,
           g.failures, g.owner, coalesce(g.expires_at <= clock_timestamp(), false),
           json_build_array(g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)::text
      into status, fingerprint, result, result_hash, error, attempt, fence, pointer, rollback, effect_started, failures, holder, expired, origin
      from holdfast.idempotency_log g where g.idem_key = key;
    alive := false;
    if status = 'partial' and holder is not null then
        alive := holdfast.operation_alive(holder, fence);
    end if;
    select extract(epoch from clock_timestamp()), max(p.version) into now, policy from holdfast.policy p;
end $$;

-- Look for the owner of an operation, and for the holders of the leases that an attempt needs; without a key, for the owners of all
-- operations. See beat_look. So an operation reads as partial when its owner is gone, and not only when its lease expires.
create function holdfast.operation_look(key text, lease text, dataset text) returns double precision
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return (select min(holdfast.beat_look(b)) from (
        select distinct l.beat as b from holdfast.lease l
         where l.name in (operation_look.lease, operation_look.dataset)
            or l.name = (select g.owner from holdfast.idempotency_log g where g.idem_key = operation_look.key and g.status = 'partial')
        union all select x.id from holdfast.beat x where operation_look.key is null and x.session_key >> 48 = 7846) beats);
end $$;

-- operation_get inside the transaction of the effect, and take its lock. Returns JSON, because a row takes twice as long.
-- Never waits. state: free, or busy if another transaction has the lock. began: operation_end compares it, to see that it runs
-- in the same transaction. fixed: the transaction has one snapshot, so a retry in it would read the same. frozen: the
-- transaction is read-only. home: identifies the database to the caller; the planner folds it to a constant, so it is free. policy: the
-- version of the stored policy.
create function holdfast.operation_begin(key text, lock bigint, lease text) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    state text;
    known text;
    policy text;
begin
    -- The lock before the lease: an attempt under the lease takes the lock, too, when it begins. Both before the log, and the
    -- log in a separate statement: its snapshot must be newer than the lock.
    if not pg_try_advisory_xact_lock(lock) then
        state := 'busy';
    end if;
    select coalesce(state, (select 'busy' from holdfast.lease l where l.name = lease and holdfast.operation_alive(lease, null)), 'free'),
           (select ',"known":' || json_build_object(
                'status', g.status, 'fingerprint', g.fingerprint, 'result', encode(g.result, 'hex'), 'result_hash', g.result_hash, 'error', g.error,
                'attempt', g.attempt, 'fence', g.fence, 'pointer', g.wal_pointer, 'rollback', g.rollback, 'effect_started', g.effect_started,
                'failures', g.failures, 'alive', g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence),
                'expired', coalesce(g.expires_at <= clock_timestamp(), false),
               'origin', json_build_array(g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)::text)
              from holdfast.idempotency_log g where g.idem_key = key),
           (select ',"policy":' || max(p.version) from holdfast.policy p)
      into state, known, policy;
    return '{"state":"' || state || '","began":"' || extract(epoch from transaction_timestamp())
           || '","fixed":' || (current_setting('transaction_isolation') in ('repeatable read', 'serializable'))::text
           || case when current_setting('transaction_read_only') = 'on' then ',"frozen":true' else '' end
           || (',"home":' || 'holdfast.meta'::regclass::oid::text || ',"now":') || extract(epoch from clock_timestamp())
           || coalesce(known, '') || coalesce(policy, '') || '}';
end $$;

-- Every write of an operation has entries. An operator corrects an operation with operation_correct, which is audited: no other function
-- writes an entry of a reset, or an end that names an actor; and only wal_archive writes "archived". entries: one text or several,
-- separated by U+001F.
create function holdfast.check_entries(entries text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if entries is null then
        raise exception 'entries must not be NULL' using errcode = 'invalid_parameter_value';
    end if;
    -- The first condition is for speed: without one of these, there is no such entry, however the JSON is written.
    if (entries ~ 'actor|reset|archived' or position(chr(92) || 'u00' in entries) > 0) and exists (
        select from unnest(string_to_array(entries, chr(31), '')) part, json_array_elements(part::json) e
         where json_typeof(e) = 'array' and (e ->> 1 in ('reset', 'archived') or e ->> 1 in ('success', 'rollback') and (e ->> 5)::jsonb ? 'actor')) then
        raise exception 'an entry of a reset, or of an end with an actor, is written by operation_correct alone, and "archived" by wal_archive'
            using errcode = 'insufficient_privilege';
    end if;
end $$;

-- Every change of an operation. state: done | changed (the chain does not end with "expected"; null: there is no chain; or it would
-- undo a success that has not expired, which only a correction does; or another owner's attempt is running) | busy (a transaction has the lock). HF001 if the token does not
-- hold the lease "owner". late: the COMMIT is sent later. corrects: as operation_correct, which has recorded it.
create function holdfast.operation_put(
    key text, expected text, pointer text, number int, entries text, status text, attempt int, fence bigint, fingerprint text,
    result text, result_hash text, error text, keep double precision, effect_started boolean, failures int, rollback text, owner text, token uuid,
    lock bigint, outbox text, label text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text,
    late boolean, corrects boolean, out state text)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    at timestamptz := clock_timestamp();
    bytes bytea := decode(result, 'hex');
    until timestamptz := case status when 'success' then at + make_interval(secs => keep) end;
begin
    if lock is not null and not pg_try_advisory_xact_lock(lock) then
        state := 'busy';
        return;
    end if;
    if token is not null then
        perform holdfast.object_fence(owner, token);
    end if;
    if not corrects then
        perform holdfast.check_entries(entries);
        if holdfast.says_reset(error) then
            raise exception 'an error with "reset" is written by operation_correct alone' using errcode = 'insufficient_privilege';
        end if;
    end if;
    perform holdfast.wal_ready();
    if expected is null then
        perform holdfast.operation_count(null, label, status, attempt, fence, failures);
        insert into holdfast.idempotency_log
        values (key, pipeline, task, dataset, operation, status, result_hash, at, at, checksum, params_hash, pointer,
               fingerprint, bytes, attempt, fence, error, until, label, owner, rollback, effect_started, failures,
               case when not late then entries end) on conflict do nothing;
    else
        update holdfast.idempotency_log g set status = operation_put.status, result_hash = operation_put.result_hash, updated_at = at,
               wal_pointer = pointer, fingerprint = operation_put.fingerprint, result = bytes, attempt = operation_put.attempt,
               fence = operation_put.fence, error = operation_put.error, expires_at = until, owner = operation_put.owner,
               rollback = operation_put.rollback, effect_started = operation_put.effect_started,
               failures = case when corrects then operation_put.failures
                               -- hot: most writes end an operation; the functions below take the whole row, and would copy its result
                               when (g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)
                                    is not distinct from (pipeline, task, dataset, operation, checksum, operation_put.params_hash)
                                    and operation_put.status = 'success' and operation_put.failures = 0 then 0
                               when holdfast.operation_is_of(g, pipeline, task, dataset, operation, checksum, params_hash)
                               then holdfast.operation_count(g, label, operation_put.status, operation_put.attempt, operation_put.fence, operation_put.failures) end
         where g.idem_key = key and g.wal_pointer = expected and (corrects or g.status <> 'success' or g.expires_at <= at)
           -- an attempt that is running is written by its owner alone
           and (corrects or g.status <> 'partial' or g.owner is null or token is not null and g.owner = operation_put.owner
                or not holdfast.operation_alive(g.owner, g.fence));
    end if;
    if not found then
        perform holdfast.operation_is_of(g, pipeline, task, dataset, operation, checksum, params_hash)
           from holdfast.idempotency_log g where g.idem_key = key and not corrects;
        state := 'changed';
        return;
    end if;
    if late then
        insert into holdfast.wal_late values (key, number, at, entries);
    elsif expected is not null then
        insert into holdfast.wal_more values (key, number, at, entries);
    end if;
    if outbox is not null then
        insert into holdfast.outbox (idem_key, attempt, topic, payload, created_at)
        select key, attempt, e ->> 0, e ->> 1, at from json_array_elements(outbox::json) e;
    end if;
    state := 'done';
end $$;

create function holdfast.operation_write(
    key text, expected text, pointer text, number int, entries text, status text, attempt int, fence bigint, fingerprint text,
    result text, result_hash text, error text, keep double precision, effect_started boolean, failures int, rollback text, owner text, token uuid,
    lock bigint, outbox text, label text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text,
    late boolean default false, out state text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    state := holdfast.operation_put(key, expected, pointer, number, entries, status, attempt, fence, fingerprint, result, result_hash, error,
        keep, effect_started, failures, rollback, owner, token, lock, outbox, label, pipeline, task, dataset, operation, checksum, params_hash, late, false);
end $$;

-- For operators: a reset (status failure), a completion (success) or a rollback (undone) of an operation, under its lease. A reset and a
-- completion close its reviews. Without a pointer: reset an operation that a review refused before it had a row.
create function holdfast.operation_correct(
    key text, expected text, pointer text, number int, entries text, status text, attempt int, fence bigint, fingerprint text,
    result text, result_hash text, error text, keep double precision, effect_started boolean, failures int, rollback text, owner text, token uuid,
    label text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text,
    actor text, reason text, out state text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    action text := case status when 'failure' then 'operation_reset' when 'success' then 'operation_complete' when 'undone' then 'operation_rollback' end;
    closed int := 0;
begin
    if action is null or pointer is null and status <> 'failure' or pointer is not null and token is null then
        raise exception 'a correction needs a status: failure, success or undone; and the token of the operation''s lease'
            using errcode = 'invalid_parameter_value';
    end if;
    if pointer is not null then
        state := holdfast.operation_put(key, expected, pointer, number, entries, status, attempt, fence, fingerprint, result, result_hash, error,
        keep, effect_started, failures, rollback, owner, token, null, null, label, pipeline, task, dataset, operation, checksum, params_hash, false, true);
    else
        if exists (select from holdfast.review r where r.idem_key = key and not holdfast.policy_lets_correct(r.dataset_id, operation_correct.actor)) then
            raise exception 'the stored policy does not let % reset operation %', quote_literal(actor), quote_literal(label) using errcode = 'HF005';
        end if;
        state := case when exists (select from holdfast.idempotency_log g where g.idem_key = key) then 'changed' else 'done' end;
    end if;
    if state <> 'done' then
        return;
    end if;
    if status <> 'undone' then
        update holdfast.review r
           set closed_at = coalesce(r.closed_at, clock_timestamp()), spent_at = clock_timestamp(), actor = coalesce(r.actor, operation_correct.actor),
               outcome = coalesce(r.outcome, case operation_correct.status when 'success' then 'done' else 'reset' end),
               answer = coalesce(r.answer, reason)
         where r.idem_key = key and r.spent_at is null;
        get diagnostics closed = row_count;
    end if;
    perform holdfast.audit_act(action, left(label, 200), actor, reason, fence, jsonb_build_object('key', key, 'reviews', closed));
end $$;

-- The lease of an operation, '@op:…'. Arguments and answers are those of lease_acquire; there is no re-entry.
create function holdfast.operation_acquire(
    name text, holder text, ttl_seconds double precision, token uuid default null, beat uuid default null,
    at_least_seconds double precision default 0, solo boolean default true, session_key bigint default null, process jsonb default null)
returns holdfast.lease_answer language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return holdfast.lease_take('operation', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
end $$;

-- Begin a new operation under its lease: look, take the lease, and write the claim. status: as of operation_acquire, whose arguments
-- these are, too; or "known": the operation has a row, which is in the answer, and nothing was taken. busy: also if a transaction
-- has the lock. 40001, and it is sent again, if another process was first. told: the arguments about the operation, as of operation_end: key, lock, kinds
-- and details of the entries (separated by U+001E), fingerprint, effect_started, rollback, label, pipeline, task, dataset, operation, checksum,
-- params_hash. The entries are chained here, as operations/log.py does it, because their fence and their time are not known before.
create function holdfast.operation_claim(
    told text, name text, holder text, ttl_seconds double precision, inout token uuid, inout beat uuid, at_least_seconds double precision,
    solo boolean, session_key bigint, process jsonb,
    out status text, out fence bigint, out held_by text, out remaining double precision, out session_watch bigint,
    out known text, out pointer text, out now double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    f text[] := string_to_array(told, chr(31), '');
    at timestamptz := clock_timestamp();
    logged text;
    owned bigint;
    foreign_key boolean;
    lease record;
    claim text[];
    fenced text;
    micros text;
    hash text := '';
    body text := '';
    count int;
begin
    now := date_part('epoch', at);
    -- hot: a replay ends here
    select g.status, g.fence, g.wal_pointer,
           (g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash) is distinct from (f[8], f[9], f[10], f[11], f[12], f[13]),
           json_build_object(
               'status', g.status, 'fingerprint', g.fingerprint, 'result', encode(g.result, 'hex'), 'result_hash', g.result_hash, 'error', g.error,
               'attempt', g.attempt, 'fence', g.fence, 'pointer', g.wal_pointer, 'rollback', g.rollback, 'effect_started', g.effect_started,
               'failures', g.failures, 'alive', g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence),
               'expired', coalesce(g.expires_at <= at, false),
               'origin', json_build_array(g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)::text)
      into logged, owned, pointer, foreign_key, known from holdfast.idempotency_log g where g.idem_key = f[1];
    if found then
        if foreign_key then
            perform holdfast.operation_is_of(g, f[8], f[9], f[10], f[11], f[12], f[13]) from holdfast.idempotency_log g where g.idem_key = f[1];
        end if;
        if logged = 'partial' then
            perform from holdfast.lease l where l.name = operation_claim.name and l.token = sha256(uuid_send(operation_claim.token)) and l.fence = owned;
        end if;
        if logged <> 'partial' or not found then
            status := 'known'; token := null; beat := null; pointer := null;
            return;
        end if;
        known := null;  -- a repeated request whose first reply was lost
    elsif not pg_try_advisory_xact_lock(f[2]::bigint) then
        status := 'busy'; token := null; beat := null;
        return;
    end if;
    lease := holdfast.lease_take('operation', name, holder, ttl_seconds, token, beat, null, at_least_seconds, solo, session_key, process);
    status := lease.status; token := lease.token; beat := lease.beat; fence := lease.fence;
    held_by := lease.held_by; remaining := lease.remaining; session_watch := lease.session_watch;
    if fence is null or pointer is not null then
        return;
    end if;
    claim := string_to_array(f[3], chr(30));
    count := cardinality(claim) / 2;
    fenced := fence::text;
    micros := (extract(epoch from at) * 1000000)::bigint::text;
    for number in 1..count loop  -- at most 9 entries, of ASCII
        body := body || '[' || number || ',"' || claim[2 * number - 1] || '",1,' || fenced || ',' || micros || ','
             || to_json(claim[2 * number]) || ',null],';
        hash := encode(sha256(convert_to(
            length(f[1]) || ':' || f[1] || ',1:' || number || ',' || length(claim[2 * number - 1]) || ':' || claim[2 * number - 1] || ',1:1,'
            || length(fenced) || ':' || fenced || ',' || length(micros) || ':' || micros || ','
            || length(claim[2 * number]) || ':' || claim[2 * number] || ',-,' || length(hash) || ':' || hash || ',', 'UTF8')), 'hex');
    end loop;
    pointer := count || ':' || hash;
    body := concat('["",', body, '"', hash, '"]');
    perform holdfast.check_entries(body);
    perform holdfast.wal_ready();
    insert into holdfast.idempotency_log
    values (f[1], f[8], f[9], f[10], f[11], 'partial', null, at, at, f[12], f[13], pointer, f[4], null, 1, fence, null, null, f[7], name, f[6],
           f[5]::boolean, 0, body) on conflict do nothing;
    if not found then
        raise exception 'operation % was begun by another process meanwhile', quote_literal(f[7]) using errcode = '40001';
    end if;
end $$;

-- operation_write at the end of an attempt under a lease, which is released in any case. 55P03, and nothing is written or released,
-- while a transaction is open that the lease protects. tell: as of lease_release. again: the request is repeated; the end may be
-- written already, and the lease be gone with it.
create function holdfast.operation_finish(
    key text, expected text, pointer text, number int, entries text, status text, attempt int, fence bigint, fingerprint text,
    result text, result_hash text, error text, keep double precision, effect_started boolean, failures int, rollback text, owner text, token uuid,
    outbox text, label text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text, tell boolean, again boolean,
    out state text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if again and exists (select from holdfast.idempotency_log g where g.idem_key = key and g.wal_pointer = pointer) then
        state := 'done';
        return;
    end if;
    -- The release locks the lease, so no other check of the token is needed.
    if not exists (select from holdfast.lease l join holdfast.beat b on b.id = l.beat
                    where l.name = owner and l.token = sha256(uuid_send(operation_finish.token)) and not b.dead and b.expires_at > clock_timestamp())
       or not holdfast.lease_release(owner, null, token, false, tell) then
        perform holdfast.fenced_out(owner);
    end if;
    state := holdfast.operation_put(key, expected, pointer, number, entries, status, attempt, fence, fingerprint, result, result_hash, error,
        keep, effect_started, failures, rollback, owner, null, null, outbox, label, pipeline, task, dataset, operation, checksum, params_hash,
        false, false);
end $$;

-- operation_write at the end of the transaction of the effect. The client may have sent COMMIT behind it already, so it
-- raises: 40001 instead of "changed", HF003 if the transaction is not the one that operation_begin ran in. told: the arguments
-- of operation_write in one text, because separate arguments take longer than the work; parts end with U+001F, and an empty
-- one is null. If it starts with U+001E, JSON in ASCII follows: the connection's encoding may lack characters of a name.
create function holdfast.operation_end(told text) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    f text[] := string_to_array(case when ascii(told) = 30 then substr(told, 2)::json #>> '{}' else told end, chr(31), '');
    at timestamptz := clock_timestamp();
    place bigint;
begin
    if f[1] is distinct from extract(epoch from transaction_timestamp())::text then
        raise exception 'the transaction in which operation % began has ended: do not commit or roll back inside the operation',
            quote_literal(f[2])
            using errcode = 'HF003';
    end if;
    if f[4] is null and f[19] is null and f[26] is null and f[8] = 'success' and f[14] is null and f[17] = '0' then
        -- hot: new, a success and without events, as nearly all are; see bench operation. The check of wal_ready() is inlined.
        perform from holdfast.meta m, holdfast.space s
          where pg_sequence_last_value('holdfast.raised_for')
                = hash_record_extended(row(pg_postmaster_start_time(), pg_relation_filepath('holdfast.raised_for'), m.xmin), 0)
            and s.copy = hash_record_extended(row(pg_relation_filepath('holdfast.raised_for'), m.xmin), 0);
        if found then
            place := nextval('holdfast.place');
        end if;
        if place is null or place < (date_part('epoch', at) - 1767225600) * 1000000 - 1000000 then
            perform holdfast.wal_ready();
            place := nextval('holdfast.place');
        end if;
        if f[7] is null or position('actor' in f[7]) > 0 or position('reset' in f[7]) > 0 or position('archived' in f[7]) > 0
           or position(chr(92) || 'u00' in f[7]) > 0 then  -- as check_entries() does
            perform holdfast.check_entries(f[7]);
        end if;
        insert into holdfast.idempotency_log
        values (f[3], f[20], f[21], f[22], f[23], f[8], f[13], at, at, f[24], f[25], f[5], f[11], decode(f[12], 'hex'),
               f[9]::int, f[10]::bigint, f[14], at + make_interval(secs => f[15]::double precision), f[2], null, f[18],
               f[16]::boolean, f[17]::int, f[7], default, place) on conflict do nothing;
        if found then
            return 'done';
        end if;
    elsif holdfast.operation_put(f[3], f[4], f[5], f[6]::int, f[7], f[8], f[9]::int, f[10]::bigint, f[11], f[12], f[13], f[14],
            f[15]::double precision, f[16]::boolean, f[17]::int, f[18], null, null, null, f[19], f[2], f[20], f[21], f[22], f[23],
            f[24], f[25], f[26] is not null, false) = 'done' then
        return 'done';
    end if;
    raise exception 'operation % was changed by another process since this transaction began', quote_literal(f[2])
        using errcode = '40001';
end $$;

-- Begin many operations under one lease. New keys are inserted and carry the caller's pointer, so the call may be repeated.
-- Returns the state of the other keys. Each argument is one text for all keys, with parts that end with U+001F, an empty one
-- being null. The keys must be sorted, or two batches would deadlock. If the first row is "busy", a transaction has the lock
-- and nothing was written.
create function holdfast.operation_claim_many(
    keys text, pointers text, entries text, labels text, fingerprints text, pipelines text, tasks text, datasets text, operations text,
    checksums text,
    params_hashes text, fence bigint, rollback text, owner text, token uuid, lock bigint)
returns table (state text, key text, status text, fingerprint text, result text, result_hash text, error text, attempt int, fenced bigint,
               pointer text, handler text, effect_started boolean, failures int, alive boolean, expired boolean, origin text)
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
    set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    at timestamptz := clock_timestamp();
    k text[] := string_to_array(keys, chr(31));
    p text[] := string_to_array(pointers, chr(31));
    taken bigint;
begin
    if lock is not null and not pg_try_advisory_xact_lock(lock) then
        state := 'busy';
        return next;
        return;
    end if;
    perform holdfast.object_fence(operation_claim_many.owner, operation_claim_many.token);
    perform holdfast.check_entries(operation_claim_many.entries);
    if cardinality(string_to_array(operation_claim_many.entries, chr(31))) <> cardinality(k) then
        raise exception 'every key must have entries' using errcode = 'invalid_parameter_value';
    end if;
    perform holdfast.wal_ready();
    insert into holdfast.idempotency_log
    select a.key, a.pipeline, a.task, a.dataset, a.operation, 'partial', null, at, at, a.checksum, a.params_hash, a.pointer, a.fingerprint, null, 1,
           operation_claim_many.fence, null, null, a.label, operation_claim_many.owner, operation_claim_many.rollback, true, 0,
           a.entries
      from unnest(k, p, string_to_array(operation_claim_many.entries, chr(31)), string_to_array(labels, chr(31)), string_to_array(fingerprints, chr(31), ''), string_to_array(pipelines, chr(31)),
                  string_to_array(tasks, chr(31)), string_to_array(datasets, chr(31)), string_to_array(operations, chr(31)),
                  string_to_array(checksums, chr(31), ''), string_to_array(params_hashes, chr(31)))
           a (key, pointer, entries, label, fingerprint, pipeline, task, dataset, operation, checksum, params_hash)
        on conflict do nothing;
    get diagnostics taken = row_count;
    if taken < cardinality(k) then
        return query select null::text, g.idem_key, g.status, g.fingerprint, encode(g.result, 'hex'), g.result_hash, g.error, g.attempt, g.fence,
               g.wal_pointer, g.rollback, g.effect_started, g.failures,
               g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence),
               coalesce(g.expires_at <= clock_timestamp(), false),
           json_build_array(g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash)::text
          from unnest(k, p) a (key, pointer) join holdfast.idempotency_log g on g.idem_key = a.key and g.wal_pointer <> a.pointer;
    end if;
end $$;

-- The end of many operations, each written as by operation_write. Returns the keys whose chain has another end than expected.
create function holdfast.operation_finish_many(
    keys text, expected text, pointers text, numbers text, entries text, statuses text, results text, result_hashes text, errors text, failures text,
    effects_started text, outboxes text, keep double precision, owner text, token uuid) returns table (key text)
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
    set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    at timestamptz := clock_timestamp();
    k text[] := string_to_array(keys, chr(31));
    p text[] := string_to_array(pointers, chr(31));
    written bigint;
begin
    perform holdfast.object_fence(operation_finish_many.owner, operation_finish_many.token);
    perform holdfast.check_entries(operation_finish_many.entries);
    perform holdfast.wal_ready();
    update holdfast.idempotency_log g
       set status = a.status, result = decode(a.result, 'hex'), result_hash = a.result_hash, error = a.error, updated_at = at,
           wal_pointer = a.pointer,
           failures = holdfast.operation_count(g, g.label, a.status, g.attempt, g.fence, a.failures::int), effect_started = a.effect_started::boolean,
           expires_at = case a.status when 'success' then at + make_interval(secs => keep) end
      from unnest(k, string_to_array(expected, chr(31)), p, string_to_array(statuses, chr(31)), string_to_array(results, chr(31), ''),
                  string_to_array(result_hashes, chr(31), ''), string_to_array(errors, chr(31), ''),
                  string_to_array(operation_finish_many.failures, chr(31)),
                  string_to_array(effects_started, chr(31)))
           a (key, expected, pointer, status, result, result_hash, error, failures, effect_started)
     where g.idem_key = a.key and g.wal_pointer = a.expected and g.status = 'partial' and g.owner = operation_finish_many.owner;
    get diagnostics written = row_count;
    insert into holdfast.wal_more
    select a.key, a.number::int, at, a.entries
      from unnest(k, p, string_to_array(numbers, chr(31)), string_to_array(entries, chr(31))) a (key, pointer, number, entries)
     where written = cardinality(k)
        or exists (select from holdfast.idempotency_log g where g.idem_key = a.key and g.wal_pointer = a.pointer and g.updated_at = at);
    if outboxes <> '' then
        insert into holdfast.outbox (idem_key, attempt, topic, payload, created_at)
        select g.idem_key, g.attempt, o ->> 0, o ->> 1, at
          from unnest(k, p, string_to_array(outboxes, chr(31), '')) a (key, pointer, outbox)
          join holdfast.idempotency_log g on g.idem_key = a.key and g.wal_pointer = a.pointer and g.updated_at = at
         cross join lateral json_array_elements(a.outbox::json) o;
    end if;
    if written < cardinality(k) then
        return query select a.key from unnest(k, p) a (key, pointer)
          where not exists (select from holdfast.idempotency_log g where g.idem_key = a.key and g.wal_pointer = a.pointer);
    end if;
end $$;

-- The latest first. With max_bytes, as in other listings: the first one, and the next ones as long as their texts have no more bytes in all.
create function holdfast.operation_list(only_status text, only_dataset text, only_key text, max_rows int, max_bytes bigint default null)
returns table (key text, label text, status text, alive boolean, attempt int, fence bigint, pipeline text, task text, dataset text, operation text,
               result_hash text, error text, pointer text, rollback text, owner text, effect_started boolean, failures int,
               created_at double precision, updated_at double precision,
               expires_at double precision)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select g.idem_key, g.label, g.status, g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence),
           g.attempt, g.fence, g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.result_hash, g.error, g.wal_pointer, g.rollback,
           g.owner, g.effect_started, g.failures, extract(epoch from g.created_at)::double precision,
           extract(epoch from g.updated_at)::double precision, extract(epoch from g.expires_at)::double precision
      from (
        select page.idem_key, row_number() over steps as place, sum(page.bytes) over steps as bytes
          from (
            select x.idem_key, x.updated_at, octet_length(concat(x.label, x.pipeline_id, x.task_id, x.dataset_id, x.operation_type, x.result_hash,
                   x.error, x.wal_pointer, x.rollback)) as bytes
              from holdfast.idempotency_log x
             where (only_status is null or x.status = only_status) and (only_dataset is null or x.dataset_id = only_dataset)
               and (only_key is null or x.idem_key = only_key)
             order by x.updated_at desc, x.idem_key limit max_rows) page
        window steps as (order by page.updated_at desc, page.idem_key)) within
      join holdfast.idempotency_log g on g.idem_key = within.idem_key
     where operation_list.max_bytes is null or within.place = 1 or within.bytes <= operation_list.max_bytes
     order by within.place;
end $$;

-- The keys that begin with "prefix", hexadecimal digits: a range of the primary key, as 'g' is above every digit.
create function holdfast.operation_match(prefix text, max_rows int) returns table (key text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    return query select g.idem_key from holdfast.idempotency_log g
     where g.idem_key >= prefix and g.idem_key < prefix || 'g' order by g.idem_key limit max_rows;
end $$;

-- The chain of one operation, from an entry onwards.
create function holdfast.operation_entries(key text, after_number int, max_rows int) returns table (number int, entries text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select w.number, w.entries from holdfast.wal w
     where w.idem_key = operation_entries.key and w.number > coalesce(after_number, 0) order by w.number limit max_rows;
end $$;

-- Open a review, at most one per operation and reason at a time; returns its id.
create function holdfast.review_open(
    key text, label text, dataset text, operation text, reason text, detail text, asked_by text default null,
    fingerprint text default null, outputs text default null, four_eyes boolean default false) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    entry bigint;
begin
    update holdfast.review r set closed_at = clock_timestamp(), spent_at = clock_timestamp(), outcome = 'done'
      from holdfast.review_now n where n.id = r.id and n.idem_key = key and n.closed_at is null and n.status = 'done';
    insert into holdfast.review (idem_key, label, dataset_id, operation_type, reason, detail, opened_at, asked_by, fingerprint, outputs, four_eyes)
    values (key, label, dataset, operation, reason, detail, clock_timestamp(), asked_by, fingerprint, outputs, coalesce(four_eyes, false)) on conflict do nothing returning id into entry;
    return coalesce(entry, (select r.id from holdfast.review r where r.idem_key = key and r.reason = review_open.reason and r.closed_at is null));
end $$;

-- The decision that applies to an operation. In this order: a rejection, until a reset; an open review, except for reason
-- "attempts", which the log itself refuses; an approval of this payload, asker and outputs, which this call spends. No id: none applies.
-- token: drawn for this run, which alone may return the approval.
create function holdfast.review_take(key text, fingerprint text, asked_by text, outputs text, token uuid, out id bigint, out outcome text, out actor text, out answer text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    select r.id, r.status, r.actor, r.answer into id, outcome, actor, answer from holdfast.review_now r
     where r.idem_key = key and r.spent_at is null and (r.status = 'rejected' or r.status = 'open' and r.reason <> 'attempts')
     order by r.outcome, r.id limit 1;
    if not found then
        update holdfast.review u set spent_at = clock_timestamp(), taken = sha256(uuid_send(token)), pointer = (select g.wal_pointer from holdfast.idempotency_log g where g.idem_key = key)
         where u.id = (select r.id from holdfast.review r where r.idem_key = key and r.outcome = 'approved' and r.spent_at is null
                          and r.fingerprint is not distinct from review_take.fingerprint and r.asked_by is not distinct from review_take.asked_by
                          and r.outputs is not distinct from review_take.outputs
                        order by r.id limit 1 for update skip locked)
        returning u.id, u.outcome, u.actor, u.answer into id, outcome, actor, answer;
    end if;
end $$;

-- Return an approval that review_take spent under this token, if no attempt followed: the next attempt may use it. Not if the log of
-- the operation has grown since, nor if the stored policy has seen it used.
create function holdfast.review_return(review bigint, token uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.review r set spent_at = null
     where r.id = review and r.outcome = 'approved' and r.taken = sha256(uuid_send(token)) and r.attempt is null
       and r.pointer is not distinct from (select g.wal_pointer from holdfast.idempotency_log g where g.idem_key = r.idem_key);
    return found;
end $$;

create function holdfast.review_list(only_status text, only_id bigint, only_key text, max_rows int, max_bytes bigint default null)
returns table (id bigint, key text, label text, dataset text, operation text, reason text, detail text, opened_at double precision, status text,
               actor text, answer text, closed_at double precision, spent_at double precision, asked_by text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select r.id, r.idem_key, r.label, r.dataset_id, r.operation_type, r.reason, r.detail,
           extract(epoch from r.opened_at)::double precision,
           r.status, r.actor, r.answer, extract(epoch from r.closed_at)::double precision, extract(epoch from r.spent_at)::double precision,
           r.asked_by
      from (
        select page.*, row_number() over steps as place, sum(page.bytes) over steps as bytes_so_far
          from (
            select x.*, octet_length(concat(x.label, x.dataset_id, x.operation_type, x.detail, x.actor, x.answer, x.asked_by)) as bytes
              from holdfast.review_now x
             where (only_status is null or x.status = only_status) and (only_id is null or x.id = only_id)
               and (only_key is null or x.idem_key = only_key)
             order by x.id limit max_rows) page
        window steps as (order by page.id)) r
     where review_list.max_bytes is null or r.place = 1 or r.bytes_so_far <= review_list.max_bytes
     order by r.id;
end $$;

-- Approve or reject. False if the review is closed already, or the operation has succeeded since. HF005 if the stored policy does not let
-- this actor decide.
create function holdfast.review_decide(review bigint, outcome text, actor text, answer text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    subject text;
    key text;
begin
    if exists (select from holdfast.review r
                where r.id = review
                  and (not holdfast.policy_lets_correct(r.dataset_id, review_decide.actor)
                       or review_decide.outcome = 'approved' and r.asked_by = review_decide.actor
                          and exists (select from (select p.datasets from holdfast.policy p order by p.version desc limit 1) p, jsonb_each(p.datasets) d
                                       where coalesce(d.value ->> 'four_eyes', d.value ->> 'sovereign')::boolean and holdfast.policy_matches(holdfast.dataset_form(r.dataset_id), holdfast.dataset_form(d.key))))) then
        raise exception 'the stored policy does not let % decide review %', quote_literal(actor), review using errcode = 'HF005';
    elsif outcome = 'approved' and exists (select from holdfast.review r where r.id = review and r.four_eyes and r.asked_by = review_decide.actor) then
        raise exception 'review % needs four eyes: % asked for it, and another actor approves it', review, quote_literal(actor) using errcode = 'HF005';
    end if;
    update holdfast.review r
       set closed_at = clock_timestamp(), outcome = review_decide.outcome, actor = review_decide.actor, answer = review_decide.answer
     where r.id = review and exists (select from holdfast.review_now n where n.id = r.id and n.status = 'open') and r.closed_at is null
    returning r.label, r.idem_key into subject, key;
    if not found then
        return false;
    end if;
    perform holdfast.audit_act('review_decide', 'review ' || review, actor, answer, null,
                               jsonb_build_object('outcome', outcome, 'operation', subject, 'key', key));
    return true;
end $$;

-- Labels of related operations, or null. same: another key did, or may have done, the same to the same data. retry_of: an
-- unfinished or failed operation of the same task and parameters, with another input.
create function holdfast.operation_kin(key text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text,
    out same text, out retry_of text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
    if checksum is null then
        select g.label || ' (' || g.idem_key || ')' into same from holdfast.idempotency_log g
         where g.dataset_id = dataset and g.operation_type = operation and g.raw_checksum is null and g.params_hash = params_hash
           and g.idem_key <> key and g.status not in ('failure', 'undone') limit 1;
    else
        select g.label || ' (' || g.idem_key || ')' into same from holdfast.idempotency_log g
         where g.dataset_id = dataset and g.operation_type = operation and g.raw_checksum = checksum and g.params_hash = params_hash
           and g.idem_key <> key and g.status not in ('failure', 'undone') limit 1;
    end if;
    select g.label || ' (' || g.idem_key || ')' into retry_of from holdfast.idempotency_log g
     where g.dataset_id = dataset and g.operation_type = operation and g.params_hash = params_hash and g.pipeline_id = pipeline and g.task_id = task
       and g.raw_checksum is distinct from checksum and (g.status = 'partial' or g.status in ('failure', 'undone') and g.failures > 0) limit 1;
end $$;

-- Failed attempts of a dataset's operations that failed within the last "seconds" and have not since succeeded or been reset.
create function holdfast.operation_failed(dataset text, seconds double precision) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
    return (select coalesce(sum(g.failures), 0) from holdfast.idempotency_log g
             where g.status <> 'success' and g.updated_at > clock_timestamp() - make_interval(secs => seconds)
               and g.status in ('failure', 'undone') and g.failures > 0 and g.dataset_id is not distinct from dataset);
end $$;

revoke all on function holdfast.review_open(text, text, text, text, text, text, text, text, text, boolean),
    holdfast.review_take(text, text, text, text, uuid), holdfast.review_return(bigint, uuid), holdfast.review_list(text, bigint, text, int, bigint),
    holdfast.review_decide(bigint, text, text, text), holdfast.operation_kin(text, text, text, text, text, text, text),
    holdfast.operation_failed(text, double precision) from public;

-- The lock of a whole dataset, as keys.py derives it.
create function holdfast.dataset_lock(dataset text) returns bigint
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    body bytea := convert_to('s13:holdfast locks' || octet_length(convert_to(dataset, 'UTF8')) || ':' || dataset || 's0:n0:', 'UTF8');
begin
    return 7847::bigint << 48 | ('x' || encode(substr(sha256(convert_to('l' || octet_length(body) || ':', 'UTF8') || body), 1, 6), 'hex'))::bit(48)::bigint;
end $$;

-- Whether a pattern of the policy, with * and ?, matches. "*" also matches what has no name. E'…': the caller's session may have set
-- standard_conforming_strings = off, which changes what '\' means.
create function holdfast.policy_matches(name text, pattern text) returns boolean
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    return coalesce(name like translate(regexp_replace(pattern, E'([\\\\%_])', E'\\\\\\1', 'g'), '*?', '%_'), pattern = '*');
end $$;

-- A dataset's name as the policy compares it: case, width, invisible characters, surrounding spaces and Cyrillic and Greek letters that
-- look like Latin ones make no other dataset. The letters are in hex, for servers and clients that do not use
-- UTF-8, and capitals are among them, because lower() leaves them in a database with the locale C.
create function holdfast.dataset_form(name text) returns text
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if getdatabaseencoding() = 'UTF8' then
        name := normalize(name, NFKC);
        name := regexp_replace(name, '[\u00ad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]', '', 'g');
        name := translate(name, convert_from(decode('d0b0d0b5d0bed180d181d183d185d196d198d195d2bbd481d49bd49dd38fd0b2d0bad0bcd0bdd182ceb1ceb2ceb5ceb6ceb7ceb9cebacebccebdcebfcf81cf84cf85cf87c4b1d090d095d09ed0a0d0a1d0a3d0a5d086d088d085d2bad480d49ad49cd380d092d09ad09cd09dd0a2ce91ce92ce95ce96ce97ce99ce9ace9cce9dce9fcea1cea4cea5cea7', 'hex'), 'UTF8'),
                          'aeopcyxijshdqwlbkmhtabezhikmvoptyxiaeopcyxijshdqwlbkmhtabezhikmvoptyx');
    end if;
    return lower(btrim(name));
end $$;

-- Whether the stored policy lets this actor reset, roll back and complete operations on the dataset, and answer their reviews.
create function holdfast.policy_lets_correct(dataset text, actor text) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return not exists (select from (select p.datasets from holdfast.policy p order by p.version desc limit 1) p, jsonb_each(p.datasets) d
                        where jsonb_typeof(d.value -> 'may_reset') = 'array' and holdfast.policy_matches(holdfast.dataset_form(dataset), holdfast.dataset_form(d.key))
                          and not exists (select from jsonb_array_elements_text(d.value -> 'may_reset') a where holdfast.policy_matches(actor, a)));
end $$;

-- Checks entries of the log as they are written: the claim of an attempt, its success, and what operators write. A row that says partial
-- or success must have the entry that says so, which was checked. The argument is the
-- version of the policy, so that a transaction whose snapshot is older than the policy notices. The trigger is there only while a policy
-- is stored. HF005: the policy forbids it. HF006: the attempt was checked under another version.
create function holdfast.policy_check() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    g holdfast.idempotency_log;
    rules jsonb;
    name text;
    sovereign boolean;
    sensitive boolean;
    review boolean;
    needs_actor boolean;
    four_eyes boolean;
    kind text;
    tried int;
    detail jsonb;
    claim jsonb;
    missing text;
    lock bigint;
    dataset_lease text;
    same text;
    retry_of text;
    approver text;
    problem text;
    is_archived boolean := false;
begin
    if new.entries is null then
        return null;  -- they are written to wal_late
    end if;
    select p.datasets into rules from holdfast.policy p where p.version = tg_argv[0]::bigint;
    if not found then
        raise exception 'the policy was changed since this transaction began: roll back and try again' using errcode = '40001';
    end if;
    select * into g from holdfast.idempotency_log l where l.idem_key = new.idem_key;
    select jsonb_object_agg(r.key, r.value), bool_or((r.value ->> 'sovereign')::boolean), bool_or((r.value ->> 'sensitive')::boolean),
           bool_or((r.value ->> 'review')::boolean), bool_or((r.value ->> 'four_eyes')::boolean), bool_or(coalesce(r.value ->> 'four_eyes', r.value ->> 'sovereign')::boolean)
      into rules, sovereign, sensitive, review, needs_actor, four_eyes
      from jsonb_each(rules) r where holdfast.policy_matches(holdfast.dataset_form(g.dataset_id), holdfast.dataset_form(r.key));
    if rules is null then
        return null;
    end if;
    name := coalesce('dataset ' || quote_literal(g.dataset_id), 'an operation without a dataset');
    for kind, tried, detail in
        select e ->> 1, (e ->> 2)::int, (e ->> 5)::jsonb from json_array_elements(new.entries::json) e where json_typeof(e) = 'array'
    loop
        problem := null;
        if kind in ('reset', 'rollback', 'success') and detail ? 'actor' then
            select 'may be reset, rolled back and completed by ' || coalesce(nullif(array_to_string(array(
                       select a from jsonb_array_elements_text(r.value -> 'may_reset') a), ', '), ''), 'no one') || ', not by ' || quote_literal(detail ->> 'actor')
              into problem from jsonb_each(rules) r
             where jsonb_typeof(r.value -> 'may_reset') = 'array'
               and not exists (select from jsonb_array_elements_text(r.value -> 'may_reset') a where holdfast.policy_matches(detail ->> 'actor', a))
             limit 1;
            if problem is not null then
                raise exception '% %', name, problem using errcode = 'HF005';
            end if;
        end if;
        if kind not in ('claimed', 'success') then
            is_archived := is_archived or kind = 'archived';
            continue;
        end if;
        if kind = 'claimed' then
            claim := detail;
            -- The claim says who and why: a second one could name another actor than the one that began the attempt.
            if (select count(*) from (select w.entries from holdfast.wal w where w.idem_key = g.idem_key
                                      union all select l.entries from holdfast.wal_late l where l.idem_key = g.idem_key) w, json_array_elements(w.entries::json) e
                 where json_typeof(e) = 'array' and e ->> 1 = 'claimed' and (e ->> 2)::int = tried) > 1 then
                problem := 'is governed by the stored policy, and attempt ' || tried || ' is claimed twice';
            end if;
        elsif claim is null then
            select (e ->> 5)::jsonb into claim from holdfast.wal w, json_array_elements(w.entries::json) e
             where w.idem_key = g.idem_key and json_typeof(e) = 'array' and e ->> 1 = 'claimed' and (e ->> 2)::int = tried
             order by w.number desc limit 1;
        end if;
        select string_agg(f, ', ') into missing from (
            select distinct f from (
                select f from jsonb_each(rules) r, jsonb_array_elements_text(coalesce(r.value -> 'requires', '[]')) f
                 union all select 'justification' where sensitive
                 union all select 'actor' where needs_actor) every_field (f)
             where coalesce(btrim(case f when 'checksum' then g.raw_checksum else claim ->> f end), '') = '' order by f) missing_fields;
        if claim is null then
            problem := 'is governed by the stored policy, and this attempt has no entry "claimed"';
        elsif kind = 'claimed' and claim ->> 'policy' is distinct from tg_argv[0] then
            raise exception '% is governed by version % of the stored policy, and this attempt was checked under %', name, tg_argv[0],
                coalesce('version ' || (claim ->> 'policy'), 'none')
                using errcode = 'HF006', hint = 'Follow the policy, see holdfast.policy_list(), and name its version in the entry "claimed".';
        elsif kind = 'success' and detail ? 'actor' then
            continue;  -- an operator says that it happened
        elsif problem is null and missing is not null then
            problem := 'requires ' || missing;
        end if;
        if problem is null and sovereign and g.dataset_id is not null then
            lock := holdfast.dataset_lock(g.dataset_id);
            dataset_lease := '@op:' || lpad(to_hex(lock), 16, '0');
            if not pg_try_advisory_xact_lock(lock) or g.owner is null and holdfast.operation_alive(dataset_lease, null) then
                problem := 'is sovereign, and is locked by another operation';
            elsif g.owner is not null and not holdfast.operation_alive(dataset_lease, null)
                  or kind = 'claimed' and g.owner is not null and not exists (
                      select from holdfast.lease o join holdfast.lease d on d.beat = o.beat where o.name = g.owner and d.name = dataset_lease) then
                problem := 'is sovereign, and this operation has not locked it as a whole';
            end if;
        end if;
        if problem is null and kind = 'claimed' then
            same := null;
            retry_of := null;
            if sensitive then
                select k.same, k.retry_of into same, retry_of
                  from holdfast.operation_kin(g.idem_key, g.pipeline_id, g.task_id, g.dataset_id, g.operation_type, g.raw_checksum, g.params_hash) k;
            end if;
            if same is not null and (g.raw_checksum is not null or claim ->> 'bucket' is null) then
                problem := 'is sensitive, and the same was done to it under another key: ' || same;
            elsif review or retry_of is not null then
                approver := null;
                update holdfast.review r set attempt = tried
                 where r.id = (claim ->> 'review')::bigint and r.idem_key = g.idem_key and r.outcome = 'approved' and r.spent_at is not null
                   and coalesce(r.attempt, tried) = tried and r.asked_by is not distinct from claim ->> 'actor'
                   and r.fingerprint is not distinct from g.fingerprint
                returning r.actor into approver;
                if approver is null then
                    problem := 'needs an approved review for this attempt';
                elsif four_eyes and approver = claim ->> 'actor' then
                    problem := 'needs four eyes: ' || quote_literal(approver) || ' approved the review, and another actor runs the operation';
                end if;
            end if;
        end if;
        if problem is not null then
            raise exception '% %', name, problem using errcode = 'HF005';
        end if;
    end loop;
    kind := case g.status when 'partial' then 'claimed' when 'success' then 'success' end;
    if kind is not null and not is_archived and not exists (
        select from (select new.entries union all select w.entries from holdfast.wal w where w.idem_key = g.idem_key
                     union all select l.entries from holdfast.wal_late l where l.idem_key = g.idem_key) w, json_array_elements(w.entries::json) e
         where json_typeof(e) = 'array' and e ->> 1 = kind and (e ->> 2)::int = g.attempt) then
        raise exception '% is governed by the stored policy, and attempt % has no entry "%"', name, g.attempt, kind using errcode = 'HF005';
    end if;
    return null;
end $$;

-- Store a policy: declarations by pattern, as in the tables "datasets" of a policy file; {} stores none. Returns its version; null if the
-- version in force is not "expected". Waits for transactions that have written an operation, and they for it: what commits later was
-- checked. 55P03 if they take longer than 5 seconds.
create function holdfast.policy_apply(datasets jsonb, actor text, reason text, expected bigint default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    latest bigint;
    rule record;
    wrong text;
    log text;
begin
    perform holdfast.audit_check(actor, reason);
    if jsonb_typeof(datasets) is distinct from 'object' then
        raise exception 'datasets must be an object with a declaration for each pattern' using errcode = 'invalid_parameter_value';
    end if;
    for rule in select * from jsonb_each(datasets) loop
        perform holdfast.check_name('pattern', rule.key);
        if rule.key ~ '[][]' or jsonb_typeof(rule.value) <> 'object' then
            raise exception 'dataset %: a pattern has no brackets, and its declaration is an object', quote_literal(rule.key) using errcode = 'invalid_parameter_value';
        end if;
        select f.key into wrong from jsonb_each(rule.value) f where not case
            when f.key in ('sovereign', 'sensitive', 'review', 'four_eyes') then jsonb_typeof(f.value) = 'boolean'
            when f.key in ('h3_resolution', 'error_budget') then jsonb_typeof(f.value) = 'number'
            when f.key = 'when_locked' then f.value in ('"escalate"', '"fail"')
            when f.key = 'requires' then jsonb_typeof(f.value) = 'array' and f.value <@ '["actor", "justification", "checksum", "bucket", "version"]'
            when f.key = 'h3_properties' then jsonb_typeof(f.value) = 'array' and not jsonb_path_exists(f.value, '$[*] ? (@.type() != "string")')
            when f.key = 'may_reset' then jsonb_typeof(f.value) = 'array'
                 and not exists (select from jsonb_array_elements(f.value) a where jsonb_typeof(a) <> 'string' or a #>> '{}' ~ '[][]')
            else false end limit 1;
        if wrong is not null then
            raise exception 'dataset %: there is no setting %, or its value is not allowed', quote_literal(rule.key), quote_literal(wrong)
                using errcode = 'invalid_parameter_value';
        end if;
    end loop;
    lock table holdfast.policy in exclusive mode;
    select coalesce(max(p.version), 0) into latest from holdfast.policy p;
    if latest <> expected then
        return null;
    end if;
    insert into holdfast.policy (version, actor, role, reason, datasets) values (latest + 1, actor, session_user, reason, datasets);
    foreach log in array array['idempotency_log', 'wal_more', 'wal_late'] loop
        if datasets = '{}' then
            execute format('drop trigger if exists policy_check on holdfast.%I', log);
        else
            execute format('create or replace trigger policy_check after insert on holdfast.%I for each row execute function holdfast.policy_check(%L)', log, latest + 1);
            execute format('alter table holdfast.%I enable always trigger policy_check', log);  -- even under session_replication_role = replica
        end if;
    end loop;
    perform holdfast.audit_act('policy_apply', 'version ' || latest + 1, actor, reason, null, null);
    return latest + 1;
end $$;

-- The latest version first.
create function holdfast.policy_list(only_version bigint default null, max_rows int default 100)
returns table (version bigint, applied_at double precision, actor text, role text, reason text, datasets jsonb)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select p.version, extract(epoch from p.applied_at)::double precision, p.actor, p.role, p.reason, p.datasets
      from holdfast.policy p where only_version is null or p.version = only_version order by p.version desc limit max_rows;
end $$;

revoke all on function holdfast.dataset_lock(text), holdfast.policy_matches(text, text), holdfast.dataset_form(text), holdfast.policy_lets_correct(text, text), holdfast.policy_check(),
    holdfast.policy_apply(jsonb, text, text, bigint), holdfast.policy_list(bigint, int) from public;

revoke all on function holdfast.operation_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
    holdfast.operation_claim(text, text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb),
    holdfast.operation_finish(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        text, text, text, text, text, text, text, text, boolean, boolean),
    holdfast.operation_is_of(holdfast.idempotency_log, text, text, text, text, text, text), holdfast.says_reset(text),
    holdfast.operation_count(holdfast.idempotency_log, text, text, int, bigint, int),
    holdfast.operation_look(text, text, text), holdfast.operation_alive(text, bigint), holdfast.operation_get(text), holdfast.operation_begin(text, bigint, text),
    holdfast.operation_write(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        bigint, text, text, text, text, text, text, text, text, boolean), holdfast.check_entries(text),
    holdfast.operation_put(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        bigint, text, text, text, text, text, text, text, text, boolean, boolean),
    holdfast.operation_correct(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        text, text, text, text, text, text, text, text, text), holdfast.operation_end(text), holdfast.wal_ready(), holdfast.wal_late(),
    holdfast.operation_claim_many(text, text, text, text, text, text, text, text, text, text, text, bigint, text, text, uuid, bigint),
    holdfast.operation_finish_many(text, text, text, text, text, text, text, text, text, text, text, text, double precision, text, uuid),
    holdfast.operation_list(text, text, text, int, bigint), holdfast.operation_match(text, int), holdfast.operation_entries(text, int, int)
    from public;

insert into holdfast.schema_version (version, name) values (6, 'operation');
