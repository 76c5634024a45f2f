-- name: guard_acquire
select status, fence, held_by, remaining, session_watch from holdfast.guard_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: elector_acquire
select status, fence, held_by, remaining, session_watch from holdfast.elector_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: gate_acquire
select status, fence, held_by, remaining, session_watch from holdfast.gate_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: gate_open
select status, fence, held_by, remaining, null as session_watch
  from holdfast.gate_open(:name, :seconds::double precision, :actor, :reason, :token::uuid, :process::jsonb)

-- name: gate_close
select holdfast.gate_close(:name, :actor, :reason, false) as answer

-- name: slot_claim
select name, status, fence, held_by, remaining, null as session_watch from holdfast.slot_claim(
    :pool, :capacity::int, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :solo::boolean, :process::jsonb)

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast.slot_list(:pool)

-- name: slot_abandon
select holdfast.slot_abandon(:name, :token::uuid, true) as done

-- name: slot_release
select holdfast.slot_abandon(:name, :token::uuid, false) as done

-- name: shard_list
select name, holder, remaining from holdfast.shard_list(:shards)

-- name: peer_announce
select holdfast.peer_announce(:name, :token::uuid, :address, :key) as done

-- name: peer_find
select address, key from holdfast.peer_find(:name)
