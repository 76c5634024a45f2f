-- name: operation_get
select status, fingerprint, result, result_hash, error, attempt, fence, pointer, rollback, effect_started, failures, alive, expired, now, policy, origin
  from holdfast.operation_get(:key)

-- name: operation_look
select holdfast.operation_look(:key, :lease, :dataset) as seconds

-- name: operation_begin
-- This and operation_end also run in the user's own transaction, hence the casts.
select holdfast.operation_begin(cast(:key as text), cast(:lock as bigint), cast(:lease as text)) as answer

-- name: operation_write
select holdfast.operation_write(
    :key, :expected, :pointer, :number::int, :entries, :status, :attempt::int, :fence::bigint, :fingerprint, :result, :result_hash, :error,
    :keep::double precision, :effect_started::boolean, :failures::int, :rollback, :owner, :token::uuid, :lock::bigint, :outbox, :label, :pipeline,
    :task, :dataset, :operation, :checksum, :params_hash) as state

-- name: operation_acquire
select status, fence, held_by, remaining, session_watch from holdfast.operation_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: operation_claim
select status, fence, held_by, remaining, session_watch, known, pointer, now from holdfast.operation_claim(
    :told, :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: operation_finish
select holdfast.operation_finish(
    :key, :expected, :pointer, :number::int, :entries, :status, :attempt::int, :fence::bigint, :fingerprint, :result, :result_hash, :error,
    :keep::double precision, :effect_started::boolean, :failures::int, :rollback, :owner, :token::uuid, :outbox, :label, :pipeline,
    :task, :dataset, :operation, :checksum, :params_hash, coalesce(:tell::boolean, false), coalesce(:again::boolean, false)) as state

-- name: operation_correct
select holdfast.operation_correct(
    :key, :expected, :pointer, :number::int, :entries, :status, :attempt::int, :fence::bigint, :fingerprint, :result, :result_hash, :error,
    :keep::double precision, :effect_started::boolean, :failures::int, :rollback, :owner, :token::uuid, :label, :pipeline,
    :task, :dataset, :operation, :checksum, :params_hash, :actor, :reason) as state

-- name: operation_end
select holdfast.operation_end(cast(:told as text)) as state

-- name: operation_claim_many
select state, key, status, fingerprint, result, result_hash, error, attempt, fenced as fence, pointer, handler as rollback,
       effect_started, failures, alive,
       expired, origin, extract(epoch from clock_timestamp())::double precision as now
  from holdfast.operation_claim_many(
    :keys, :pointers, :entries, :labels, :fingerprints, :pipelines, :tasks, :datasets, :operations, :checksums, :params_hashes,
    :fence::bigint, :rollback, :owner, :token::uuid, :lock::bigint)

-- name: operation_finish_many
select key, null as state from holdfast.operation_finish_many(
    :keys, :expected, :pointers, :numbers, :entries, :statuses, :results, :result_hashes, :errors, :failures, :effects_started,
    :outboxes, :keep::double precision, :owner, :token::uuid)

-- name: operation_list
select key, label, status, alive, attempt, fence, pipeline, task, dataset, operation, result_hash, error, pointer, rollback, owner,
       effect_started, failures,
       created_at, updated_at, expires_at from holdfast.operation_list(:status, :dataset, :key, :limit::int, :max_bytes::bigint)

-- name: operation_match
select l.key, label, status, alive, attempt, fence, pipeline, task, dataset, operation, result_hash, error, pointer, rollback, owner,
       effect_started, failures,
       created_at, updated_at, expires_at
  from holdfast.operation_match(:prefix, :limit::int) m cross join lateral holdfast.operation_list(null, null, m.key, 1) l order by l.key

-- name: operation_entries
select number, entries from holdfast.operation_entries(:key, :after_number::int, :limit::int)

-- name: operation_kin
-- This, and the two after it, also run in the user's own transaction, hence the casts.
select same, retry_of from holdfast.operation_kin(
    cast(:key as text), cast(:pipeline as text), cast(:task as text), cast(:dataset as text), cast(:operation as text), cast(:checksum as text),
    cast(:params_hash as text))

-- name: review_open
select holdfast.review_open(
    cast(:key as text), cast(:label as text), cast(:dataset as text), cast(:operation as text), cast(:reason as text),
    cast(:detail as text), cast(:asked_by as text), cast(:fingerprint as text), cast(:outputs as text),
    cast(:four_eyes as boolean)) as id

-- name: review_take
select id, outcome, actor, answer from holdfast.review_take(
    cast(:key as text), cast(:fingerprint as text), cast(:asked_by as text), cast(:outputs as text), cast(:token as uuid))

-- name: review_return
select holdfast.review_return(cast(:id as bigint), cast(:token as uuid)) as returned

-- name: review_list
select id, key, label, dataset, operation, reason, detail, opened_at, status, actor, answer, closed_at, spent_at, asked_by
  from holdfast.review_list(:status, :id::bigint, :key, :limit::int, :max_bytes::bigint)

-- name: review_decide
select holdfast.review_decide(:id::bigint, :outcome, :actor, :answer) as decided

-- name: operation_failed
select holdfast.operation_failed(:dataset, :seconds::double precision) as failed

-- name: wal_chains
select * from holdfast.wal_chains(array(select key from holdfast.wal_keys(:key, :since::double precision, :after, :limit::int)))

-- name: wal_latest
select * from holdfast.wal_chains(array(select key from holdfast.wal_latest(:limit::int)))

-- name: wal_find
select key from holdfast.wal_find(:hash)

-- name: wal_read
select space, expired, horizon::text, place, key, entries from holdfast.wal_read(:space::bigint, :after_horizon::xid8, :after_place::bigint, :limit::int,
    :max_bytes::bigint)

-- name: wal_archive
select state from holdfast.wal_archive(:key, :expected, :pointer, :number::int, :entries, :actor, :reason)

-- name: operation_expire
select gone from holdfast.operation_expire(:limit::int, :actor, :reason)

-- name: operation_health
select * from holdfast.operation_health(:stale::double precision, :enough::int)

-- name: operation_activity
select bucket, kind, value from holdfast.operation_activity(:step::double precision, :buckets::int, :max_rows::int)

-- name: operation_indexes
select name from holdfast.operation_indexes()
