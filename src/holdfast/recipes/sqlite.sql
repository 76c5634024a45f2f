-- name: slot_claim.granted_before
select name, 'acquired' as status, token, (select beat from holdfast_lease l where l.name = s.name) as beat, fence, null as held_by, remaining,
       null as session_watch from holdfast_slot s where pool = :pool and token = :token;

-- name: slot_claim.full
-- Slots above the capacity, held since before it was reduced, count, too.
select null as name, 'held' as status, null as token, null as beat, null as fence, min(holder) as held_by, min(remaining) as remaining,
       null as session_watch from holdfast_slot where pool = :pool having count(*) >= :capacity;

-- name: slot_claim.lowest_free
with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :capacity)
select :pool || ':' || n as name from numbers where n not in (select slot from holdfast_slot where pool = :pool) order by n limit 1;

-- name: slot_claim.granted
select l.name, 'acquired' as status, l.token, l.beat, l.fence, null as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast_slot where pool = '@slot:' || :pool order by slot;

-- name: slot.held
select name from holdfast_slot where pool = :pool and token = :token;

-- name: shard_list
-- Two ranges of the index on name, for two prefixes: "0" is the character after "/".
select name, holder, remaining from holdfast_live
 where name > :shards || '/shard/' and name < :shards || '/shard0' or name > :shards || '/member/' and name < :shards || '/member0';
