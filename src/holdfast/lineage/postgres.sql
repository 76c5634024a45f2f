-- name: relay_acquire
select status, fence, held_by, remaining, session_watch from holdfast.relay_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: relay_read
select horizon::text, place, key, number, entries, before, outbox, label, pipeline, task, dataset, operation, checksum, params_hash
  from holdfast.relay_read(:after_horizon::xid8, :after_place::bigint, :limit::int)

-- name: relay_open
select 'done' as state, horizon::text, place, tries, taken, coalesce(lag, 0) as lag from holdfast.relay_open(:name, :lease, :token::uuid)

-- name: relay_begin
select 'begun' as state from holdfast.relay_begin(:name, :lease, :token::uuid, :tries)

-- name: relay_move
select case when moved then 'moved' else 'gone' end as state from holdfast.relay_move(
    :name, :lease, :token::uuid, :fence::bigint, :horizon::xid8, :place::bigint, :told::bigint, :ended, :parked, :freed, :problem, :tries, :taken)

-- name: relay_list
select name, told, fence, moved_at, problem, since, holder, parked, entries, lag, cursor from holdfast.relay_list()

-- name: relay_parked
select id, key, event, problem, tries, parked_at, again from holdfast.relay_parked(:name, :only_again::boolean, :limit::int)

-- name: relay_retry
select asked from holdfast.relay_retry(:name, :id)

-- name: relay_remove
select removed from holdfast.relay_remove(:name, :actor, :reason)
