-- name: gate.refused
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
values ({now}, :actor, :action, :name, :reason, :fence, :detail, 'refused: ' || :why, {now});

-- name: gate_open.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
values ({now}, :actor, 'gate_open', :name, :reason, :fence, :detail, 'done', {now});

-- name: gate_close.opened
select holder, fence, json_extract(info, '$.for') is null as is_window from holdfast_live where name = :lease;

-- name: gate_close.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
select {now}, :actor, 'gate_close', :name, :reason, fence, json_object('holder', holder), 'done', {now} from holdfast_lease where name = :lease;

-- name: slot_claim.granted_before
select name, 'acquired' as status, fence, null as held_by, remaining, null as session_watch from holdfast_slot where pool = :pool and token = :token;

-- name: slot_claim.full
-- Slots above the capacity, held since before it was reduced, count, too.
select null as name, 'held' as status, null as fence, min(holder) as held_by, min(remaining) as remaining,
       null as session_watch from holdfast_slot where pool = :pool having count(*) >= :capacity;

-- name: slot_claim.lowest_free
with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :capacity)
select :pool || ':' || n as name from numbers where n not in (select slot from holdfast_slot where pool = :pool) order by n limit 1;

-- name: slot_claim.granted
select l.name, 'acquired' as status, l.fence, null as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast_slot where pool = '@slot:' || :pool order by slot;

-- name: slot.held
select name from holdfast_slot where pool = :pool and token = :token;

-- name: shard_list
-- Two ranges of the index on name, for two prefixes: "0" is the character after "/".
select name, holder, remaining from holdfast_live
 where name > :shards || '/shard/' and name < :shards || '/shard0' or name > :shards || '/member/' and name < :shards || '/member0';
