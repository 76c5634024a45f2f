-- name: schedule_register
select holdfast.schedule_register(:wanted::jsonb)::text as registered

-- name: schedule_change
select holdfast.schedule_change(:name, :expected::bigint, :every, :zone) as changed

-- name: schedule_look
select name, every, zone, cursor, paused, opens, last, now from holdfast.schedule_look(:names::jsonb)

-- name: schedule_advance
select state, now, reached from holdfast.schedule_advance(
    :name, :expected::bigint, :cursor::bigint, :skips::jsonb, :slot::bigint, :overlap::int, :owner)

-- name: schedule_take
-- This and schedule_settle also run in the user's own transaction, hence the casts.
select attempt, now, previous from holdfast.schedule_take(cast(:name as text), cast(:slot as bigint), cast(:owner as text))

-- name: schedule_settle
select holdfast.schedule_settle(
    cast(:name as text), cast(:slot as bigint), cast(:attempt as int), cast(:status as text), cast(:reason as text), cast(:note as text)) as settled

-- name: schedule_slots
select slot, until, count, status, reason, attempt, owner, started_at, ended_at, note
  from holdfast.schedule_slots(:name, :slot::bigint, :only_runs::boolean, :limit::int)

-- name: schedule_activity
select bucket, kind, value from holdfast.schedule_activity(:step::double precision, :buckets::int)

-- name: schedule_pause
select holdfast.schedule_pause(:name, :paused::boolean, :actor, :reason) as done

-- name: schedule_order
select holdfast.schedule_order(:name, :slot::bigint, :actor, :reason) as slot

-- name: schedule_remove
select holdfast.schedule_remove(:name, :actor, :reason) as done
