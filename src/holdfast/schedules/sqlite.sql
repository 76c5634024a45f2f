-- name: schedule_register
insert into holdfast_schedule (name, every, zone, cursor, created_at)
select value ->> 0, value ->> 1, value ->> 2, coalesce(value ->> 3, (select now from holdfast_schedule_now)), {now}
  from json_each(:wanted) where true on conflict do nothing;

-- name: schedule_change.update
update holdfast_schedule set every = :every, zone = :zone, cursor = max(cursor, (select now from holdfast_schedule_now))
 where name = :name and cursor = :expected;

-- name: schedule_look
select name, every, zone, cursor, paused, now,
       (select json_group_array(json_array(slot, attempt, taken_at)) from (
            select slot, attempt, taken_at from holdfast_schedule_slot p where p.name = s.name and p.status = 'open' order by slot)) as opens,
       case when :names is null then (
            select json_object('slot', slot, 'until', until, 'count', count, 'status', status, 'reason', reason, 'attempt', attempt,
                               'owner', owner, 'started_at', started_at, 'ended_at', ended_at, 'note', note)
              from holdfast_schedule_slot p where p.name = s.name and p.status <> 'open' order by slot desc limit 1) end as last
  from holdfast_schedule s, holdfast_schedule_now where :names is null or name in (select value from json_each(:names)) order by name;

-- name: schedule_advance.state
select case when cursor is null then 'gone' when cursor <> :expected then 'moved' when :cursor > now then 'early'
            when :slot is not null and paused is not null then 'paused'
            when paused is null and json_extract(:skips, '$[0][3]') = 'paused' then 'resumed'
            when :slot is not null and :overlap <= (select count(*) from holdfast_schedule_slot where name = :name and status = 'open') then 'full'
            else 'free' end as state, now, cursor as reached
  from holdfast_schedule_now left join holdfast_schedule on name = :name;

-- name: schedule_advance.extend
update holdfast_schedule_slot set until = :last, count = min(count + :count, 2001), ended_at = {now}
 where name = :name and status = 'skipped' and reason = :reason and until = :expected
   and slot = (select max(slot) from holdfast_schedule_slot where name = :name and slot <= :expected);

-- name: schedule_advance.skip
insert into holdfast_schedule_slot (name, slot, until, count, status, reason, attempt, owner, taken_at, ended_at)
select :name, :first, :last, :count, 'skipped', :reason, 0, :owner, now, {now} from holdfast_schedule_now where true on conflict do nothing;

-- name: schedule_advance.open
insert into holdfast_schedule_slot (name, slot, until, count, status, attempt, owner, taken_at)
select :name, :slot, :slot, 1, 'open', 0, :owner, now from holdfast_schedule_now where true on conflict do nothing;

-- name: schedule_advance.trim
delete from holdfast_schedule_slot where name = :name and status <> 'open'
   and slot < (select slot from holdfast_schedule_slot where name = :name order by slot desc limit 1 offset 1000);

-- name: schedule_advance.cursor
update holdfast_schedule set cursor = :cursor where name = :name;

-- name: schedule_take.update
update holdfast_schedule_slot set attempt = attempt + 1, owner = :owner, taken_at = (select now from holdfast_schedule_now),
       started_at = coalesce(started_at, {now})
 where name = :name and slot = :slot and status = 'open' returning attempt;

-- name: schedule_take.previous
select now, (select json_object('slot', slot, 'until', until, 'count', count, 'status', status, 'reason', reason, 'attempt', attempt,
                                'owner', owner, 'started_at', started_at, 'ended_at', ended_at, 'note', note)
               from holdfast_schedule_slot where name = :name and slot < :slot and status in ('success', 'failure')
              order by slot desc limit 1) as previous
  from holdfast_schedule_now;

-- name: schedule_settle.close
update holdfast_schedule_slot set status = :status, reason = coalesce(:reason, reason), note = :note, ended_at = {now}
 where name = :name and slot = :slot and status = 'open' and attempt = :attempt;

-- name: schedule_settle.reopen
update holdfast_schedule_slot set status = 'open', reason = null, taken_at = (select now from holdfast_schedule_now), ended_at = null
 where name = :name and slot = :slot and status = 'failure' and attempt = :attempt;

-- name: schedule_slots
select slot, until, count, status, reason, attempt, owner, started_at, ended_at, note from holdfast_schedule_slot
 where name = :name and (:slot is null or slot = :slot) and (not :only_runs or status in ('success', 'failure')) order by slot desc limit :limit;

-- name: schedule_activity
with origin as (select (cast({now} / :step as integer) + 1 - :buckets) * :step as start)
select null as bucket, 'start' as kind, start as value from origin
union all
select cast((p.slot / 1000000.0 - start) / :step as integer), 'late', max(p.started_at - p.slot / 1000000.0)
  from origin, holdfast_schedule s join holdfast_schedule_slot p
    on p.name = s.name and p.slot >= start * 1000000 and p.started_at is not null group by 1;

-- name: schedule_pause.update
update holdfast_schedule set paused = case when :paused then 'by ' || :actor || ': ' || :reason end where name = :name;

-- name: schedule.audit
insert into holdfast_audit (at, actor, action, subject, reason, detail, outcome, ended_at)
values ({now}, :actor, :action, :name, :reason, :detail, 'done', {now});

-- name: schedule_order.known
select 1 from holdfast_schedule where name = :name;

-- name: schedule_order.insert
insert into holdfast_schedule_slot (name, slot, until, count, status, reason, attempt, taken_at, ended_at)
select :name, coalesce(:slot, now), coalesce(:slot, now), 1, case when :slot is null then 'open' else 'skipped' end,
       case when :slot is null then 'ordered ' else '' end || 'by ' || :actor || ': ' || :reason, 0, now,
       case when :slot is not null then {now} end
  from holdfast_schedule_now where true
    on conflict do update set status = 'skipped', reason = excluded.reason, ended_at = {now}
 where :slot is not null and status = 'open' and attempt = 0 returning slot;

-- name: schedule_remove.slots
delete from holdfast_schedule_slot where name = :name;

-- name: schedule_remove.schedule
delete from holdfast_schedule where name = :name;
