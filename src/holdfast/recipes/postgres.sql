-- name: slot_claim
select name, status, token, beat, fence, held_by, remaining, null as session_watch from holdfast.slot_claim(
    :pool, :capacity::int, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :solo::boolean, :process::jsonb)

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast.slot_list(:pool)

-- name: slot_abandon
select holdfast.slot_abandon(:name, :token::uuid, true) as done

-- name: slot_release
select holdfast.slot_abandon(:name, :token::uuid, false) as done

-- name: shard_list
select name, holder, remaining from holdfast.shard_list(:shards)
