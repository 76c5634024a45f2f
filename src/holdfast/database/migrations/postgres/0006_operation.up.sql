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
    spent_at       timestamptz
);
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

-- The state of an operation. The result is hex, so that every database driver returns the same. Stable, as operation_alive is.
create function holdfast.operation_get(key text,
    out status text, out fingerprint text, out result text, out result_hash text, out error text, out attempt int, out fence bigint,
    out pointer text, out rollback text, out effect_started boolean, out failures int, out alive boolean, out expired boolean,
    out now double precision)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    holder text;
begin
    select g.status, g.fingerprint, encode(g.result, 'hex'), g.result_hash, g.error, g.attempt, g.fence, g.wal_pointer, g.rollback, g.effect_started,
           g.failures, g.owner, coalesce(g.expires_at <= clock_timestamp(), false)
      into status, fingerprint, result, result_hash, error, attempt, fence, pointer, rollback, effect_started, failures, holder, expired
      from holdfast.idempotency_log g where g.idem_key = key;
    alive := false;
    if status = 'partial' and holder is not null then
        alive := holdfast.operation_alive(holder, fence);
    end if;
    now := extract(epoch from clock_timestamp());
end $$;

-- Look for the owner of an operation, and for the holder of the lease that an attempt needs: see beat_look. So the operation reads as
-- partial when its owner is gone, and not only when its lease expires.
create function holdfast.operation_look(key text, lease text) returns double precision
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return (select min(holdfast.beat_look(b)) from (
        select distinct l.beat as b from holdfast.lease l
         where l.name = operation_look.lease
            or l.name = (select g.owner from holdfast.idempotency_log g where g.idem_key = operation_look.key and g.status = 'partial')) beats);
end $$;

-- operation_get inside the transaction of the effect, and take its lock. Returns JSON, because a row takes twice as long.
-- Never waits. state: free, or busy if another transaction has the lock. began: operation_end compares it, to see that it runs
-- in the same transaction. fixed: the transaction has one snapshot, so a retry in it would read the same. frozen: the
-- transaction is read-only. home: identifies the database to the caller; the planner folds it to a constant, so it is free.
create function holdfast.operation_begin(key text, lock bigint, lease text) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    state text;
    known text;
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
                'expired', coalesce(g.expires_at <= clock_timestamp(), false))
              from holdfast.idempotency_log g where g.idem_key = key)
      into state, known;
    return '{"state":"' || state || '","began":"' || extract(epoch from transaction_timestamp())
           || '","fixed":' || (current_setting('transaction_isolation') in ('repeatable read', 'serializable'))::text
           || case when current_setting('transaction_read_only') = 'on' then ',"frozen":true' else '' end
           || (',"home":' || 'holdfast.meta'::regclass::oid::text || ',"now":') || extract(epoch from clock_timestamp())
           || coalesce(known, '') || '}';
end $$;

-- Every change of an operation. state: done | changed (the chain does not end with "expected"; null: there is no chain) |
-- busy (a transaction has the lock). HF001 if the token does not hold the lease "owner". late: the COMMIT is sent later.
create function holdfast.operation_write(
    key text, expected text, pointer text, number int, entries text, status text, attempt int, fence bigint, fingerprint text,
    result text, result_hash text, error text, keep double precision, effect_started boolean, failures int, rollback text, owner text, token uuid,
    lock bigint, outbox text, label text, pipeline text, task text, dataset text, operation text, checksum text, params_hash text,
    late boolean default false, out state text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    at timestamptz := clock_timestamp();
    bytes bytea := decode(result, 'hex');
    until timestamptz := at + make_interval(secs => keep);
begin
    if lock is not null and not pg_try_advisory_xact_lock(lock) then
        state := 'busy';
        return;
    end if;
    if token is not null then
        perform holdfast.object_fence(owner, token);
    end if;
    perform holdfast.wal_ready();
    if expected is null then
        insert into holdfast.idempotency_log
        values (key, pipeline, task, dataset, operation, status, result_hash, at, at, checksum, params_hash, pointer,
               fingerprint, bytes, attempt, fence, error, until, label, owner, rollback, effect_started, failures,
               case when not late then entries end) on conflict do nothing;
    else
        update holdfast.idempotency_log g set status = operation_write.status, result_hash = operation_write.result_hash, updated_at = at,
               wal_pointer = pointer, fingerprint = operation_write.fingerprint, result = bytes, attempt = operation_write.attempt,
               fence = operation_write.fence, error = operation_write.error, expires_at = until, owner = operation_write.owner,
               rollback = operation_write.rollback, effect_started = operation_write.effect_started, failures = operation_write.failures
         where g.idem_key = key and g.wal_pointer = expected;
    end if;
    if not found then
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

-- Begin a new operation under its lease: look, take the lease, and write the claim. status: as of lease_acquire, whose arguments
-- these are, too; or "known": the operation has a row, which is in the answer, and nothing was taken. busy: also if a transaction
-- has the lock. 40001, and it is sent again, if another process was first. told: the arguments about the operation, as of operation_end: key, lock, kinds
-- and details of the entries (separated by U+001E), fingerprint, effect_started, rollback, label, pipeline, task, dataset, operation, checksum,
-- params_hash. The entries are chained here, as operations/log.py does it, because their fence and their time are not known before.
create function holdfast.operation_claim(
    told text, name text, holder text, ttl_seconds double precision, inout token uuid, inout beat uuid, reenter boolean, at_least_seconds double precision,
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
    select g.status, g.fence, g.wal_pointer, json_build_object(
               'status', g.status, 'fingerprint', g.fingerprint, 'result', encode(g.result, 'hex'), 'result_hash', g.result_hash, 'error', g.error,
               'attempt', g.attempt, 'fence', g.fence, 'pointer', g.wal_pointer, 'rollback', g.rollback, 'effect_started', g.effect_started,
               'failures', g.failures, 'alive', g.status = 'partial' and g.owner is not null and holdfast.operation_alive(g.owner, g.fence),
               'expired', coalesce(g.expires_at <= at, false))
      into logged, owned, pointer, known from holdfast.idempotency_log g where g.idem_key = f[1];
    if found then
        if logged = 'partial' then
            perform from holdfast.lease l where l.name = operation_claim.name and l.token = operation_claim.token and l.fence = owned;
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
    lease := holdfast.lease_acquire(name, holder, ttl_seconds, token, beat, reenter, at_least_seconds, solo, session_key, process);
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
    perform holdfast.wal_ready();
    insert into holdfast.idempotency_log
    values (f[1], f[8], f[9], f[10], f[11], 'partial', null, at, at, f[12], f[13], pointer, f[4], null, 1, fence, null, null, f[7], name, f[6],
           f[5]::boolean, 0, concat('["",', body, '"', hash, '"]')) on conflict do nothing;
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
                    where l.name = owner and l.token = operation_finish.token and not b.dead and b.expires_at > clock_timestamp())
       or not holdfast.lease_release(owner, token, false, tell) then
        perform holdfast.fenced_out(owner);
    end if;
    state := holdfast.operation_write(key, expected, pointer, number, entries, status, attempt, fence, fingerprint, result, result_hash, error,
        keep, effect_started, failures, rollback, owner, null, null, outbox, label, pipeline, task, dataset, operation, checksum, params_hash);
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
    if f[4] is null and f[19] is null and f[26] is null then
        -- hot: new and without events, as nearly all are; see bench operation. The check of wal_ready() is inlined.
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
        insert into holdfast.idempotency_log
        values (f[3], f[20], f[21], f[22], f[23], f[8], f[13], at, at, f[24], f[25], f[5], f[11], decode(f[12], 'hex'),
               f[9]::int, f[10]::bigint, f[14], at + make_interval(secs => f[15]::double precision), f[2], null, f[18],
               f[16]::boolean, f[17]::int, f[7], default, place) on conflict do nothing;
        if found then
            return 'done';
        end if;
    elsif holdfast.operation_write(f[3], f[4], f[5], f[6]::int, f[7], f[8], f[9]::int, f[10]::bigint, f[11], f[12], f[13], f[14],
            f[15]::double precision, f[16]::boolean, f[17]::int, f[18], null, null, null, f[19], f[2], f[20], f[21], f[22], f[23],
            f[24], f[25], f[26] is not null) = 'done' then
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
               pointer text, handler text, effect_started boolean, failures int, alive boolean, expired boolean)
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
               coalesce(g.expires_at <= clock_timestamp(), false)
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
    perform holdfast.wal_ready();
    update holdfast.idempotency_log g
       set status = a.status, result = decode(a.result, 'hex'), result_hash = a.result_hash, error = a.error, updated_at = at,
           wal_pointer = a.pointer,
           failures = a.failures::int, effect_started = a.effect_started::boolean,
           expires_at = case a.status when 'success' then at + make_interval(secs => keep) end
      from unnest(k, string_to_array(expected, chr(31)), p, string_to_array(statuses, chr(31)), string_to_array(results, chr(31), ''),
                  string_to_array(result_hashes, chr(31), ''), string_to_array(errors, chr(31), ''),
                  string_to_array(operation_finish_many.failures, chr(31)),
                  string_to_array(effects_started, chr(31)))
           a (key, expected, pointer, status, result, result_hash, error, failures, effect_started)
     where g.idem_key = a.key and g.wal_pointer = a.expected;
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

create function holdfast.operation_list(only_status text, only_dataset text, only_key text, max_rows int)
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
      from holdfast.idempotency_log g
     where (only_status is null or g.status = only_status) and (only_dataset is null or g.dataset_id = only_dataset)
       and (only_key is null or g.idem_key = only_key)
     order by g.updated_at desc, g.idem_key limit max_rows;
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
create function holdfast.review_open(key text, label text, dataset text, operation text, reason text, detail text) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    entry bigint;
begin
    update holdfast.review r set closed_at = clock_timestamp(), spent_at = clock_timestamp(), outcome = 'done'
      from holdfast.review_now n where n.id = r.id and n.idem_key = key and n.closed_at is null and n.status = 'done';
    insert into holdfast.review (idem_key, label, dataset_id, operation_type, reason, detail, opened_at)
    values (key, label, dataset, operation, reason, detail, clock_timestamp()) on conflict do nothing returning id into entry;
    return coalesce(entry, (select r.id from holdfast.review r where r.idem_key = key and r.reason = review_open.reason and r.closed_at is null));
end $$;

-- The decision that applies to an operation. In this order: a rejection, until a reset; an open review, except for reason
-- "attempts", which the log itself refuses; an approval, which this call spends. No id: none applies.
create function holdfast.review_take(key text, out id bigint, out outcome text, out actor text, out answer text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    select r.id, r.status, r.actor, r.answer into id, outcome, actor, answer from holdfast.review_now r
     where r.idem_key = key and r.spent_at is null and (r.status = 'rejected' or r.status = 'open' and r.reason <> 'attempts')
     order by r.outcome, r.id limit 1;
    if not found then
        update holdfast.review u set spent_at = clock_timestamp()
         where u.id = (select r.id from holdfast.review r where r.idem_key = key and r.outcome = 'approved' and r.spent_at is null
                        order by r.id limit 1 for update skip locked)
        returning u.id, u.outcome, u.actor, u.answer into id, outcome, actor, answer;
    end if;
end $$;

-- Return an approval that review_take spent, if no attempt followed: the next attempt may use it.
create function holdfast.review_return(review bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.review r set spent_at = null where r.id = review and r.outcome = 'approved';
    return found;
end $$;

create function holdfast.review_list(only_status text, only_id bigint, only_key text, max_rows int)
returns table (id bigint, key text, label text, dataset text, operation text, reason text, detail text, opened_at double precision, status text,
               actor text, answer text, closed_at double precision, spent_at double precision)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query select r.id, r.idem_key, r.label, r.dataset_id, r.operation_type, r.reason, r.detail,
           extract(epoch from r.opened_at)::double precision,
           r.status, r.actor, r.answer, extract(epoch from r.closed_at)::double precision, extract(epoch from r.spent_at)::double precision
      from holdfast.review_now r
     where (only_status is null or r.status = only_status) and (only_id is null or r.id = only_id) and (only_key is null or r.idem_key = only_key)
     order by r.id limit max_rows;
end $$;

-- Approve or reject. False if the review is closed already, or the operation has succeeded since.
create function holdfast.review_decide(review bigint, outcome text, actor text, answer text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.review r
       set closed_at = clock_timestamp(), outcome = review_decide.outcome, actor = review_decide.actor, answer = review_decide.answer
     where r.id = review and exists (select from holdfast.review_now n where n.id = r.id and n.status = 'open') and r.closed_at is null;
    return found;
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

revoke all on function holdfast.review_open(text, text, text, text, text, text), holdfast.review_take(text),
    holdfast.review_return(bigint), holdfast.review_list(text, bigint, text, int),
    holdfast.review_decide(bigint, text, text, text), holdfast.operation_kin(text, text, text, text, text, text, text),
    holdfast.operation_failed(text, double precision) from public;

revoke all on function holdfast.operation_claim(text, text, text, double precision, uuid, uuid, boolean, double precision, boolean, bigint, jsonb),
    holdfast.operation_finish(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        text, text, text, text, text, text, text, text, boolean, boolean),
    holdfast.operation_look(text, text), holdfast.operation_alive(text, bigint), holdfast.operation_get(text), holdfast.operation_begin(text, bigint, text),
    holdfast.operation_write(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int, text, text, uuid,
        bigint, text, text, text, text, text, text, text, text, boolean), holdfast.operation_end(text), holdfast.wal_ready(), holdfast.wal_late(),
    holdfast.operation_claim_many(text, text, text, text, text, text, text, text, text, text, text, bigint, text, text, uuid, bigint),
    holdfast.operation_finish_many(text, text, text, text, text, text, text, text, text, text, text, text, double precision, text, uuid),
    holdfast.operation_list(text, text, text, int), holdfast.operation_match(text, int), holdfast.operation_entries(text, int, int)
    from public;

insert into holdfast.schema_version (version, name) values (6, 'operation');
