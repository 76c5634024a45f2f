-- name: slot_claim
-- volatile
-- Chooses the lowest free slot, then acquires its lease as lease_acquire does. Slots above the capacity, held since before it was reduced, count, too.
-- stop
select name, 'acquired' as status, token, (select beat from holdfast_lease l where l.name = s.name) as beat, fence, null as held_by, remaining,
       null as session_watch from holdfast_slot s where pool = :pool and token = :token;
-- stop
select null as name, 'held' as status, null as token, null as beat, null as fence, min(holder) as held_by, min(remaining) as remaining,
       null as session_watch from holdfast_slot where pool = :pool having count(*) >= :capacity;
with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :capacity)
select :pool || ':' || n as name from numbers where n not in (select slot from holdfast_slot where pool = :pool) order by n limit 1;
-- as: lease_acquire
select l.name, 'acquired' as status, l.token, l.beat, l.fence, null as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast_slot where pool = :pool order by slot;

-- name: slot_abandon
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_slot where pool = :name and token = :token);
select name from holdfast_slot where pool = :name and token = :token;
-- as: lease_abandon

-- name: slot_release
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_slot where pool = :name and token = :token);
select name from holdfast_slot where pool = :name and token = :token;
-- as: lease_release

-- name: shard_list
-- Two ranges of the index on name, for two prefixes: "0" is the character after "/".
select name, holder, remaining from holdfast_live
 where name > :shards || '/shard/' and name < :shards || '/shard0' or name > :shards || '/member/' and name < :shards || '/member0';
