-- name: lease_take.granted_before
select 'acquired' as status, fence, null as held_by, remaining, null as session_watch
  from holdfast_live where name = :name and token = :token;

-- name: lease_take.held
select 'held' as status, null as fence, holder as held_by, remaining, session_key as session_watch
  from holdfast_live where name = :name and not coalesce(reenter = :reenter and holder = :holder and not kept, 0) and not coalesce(holdfast_gone(session_key), 0);

-- name: lease_take.beat_lost
select 'beat_lost' as status, null as fence, null as held_by, null as remaining, null as session_watch
 where (:label is null or exists (select 1 from holdfast_beat where id = :beat))
   and not exists (select 1 from holdfast_beat where id = :beat and not dead and expires_at > {now} and not coalesce(holdfast_gone(session_key), 0));

-- name: lease_take.former
select l.beat, l.holder,
       case when b.id = :beat then 'reentered'  -- alive by the step before, and the clock goes on between two steps
            when b.id is null or b.dead or b.expires_at <= {now} then 'expired'
            when coalesce(holdfast_gone(b.session_key), 0) then 'session_lost' else 'reentered' end as outcome
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: lease_take.fence
update holdfast_fence set last = max(last + 1, (select micros from holdfast_clock)) returning last as fence;

-- name: lease_take.history
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, min(coalesce(b.expires_at, {now}), {now}), :outcome
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name and not l.kept;

-- name: lease_take.leave_beat
update holdfast_beat set generation = generation + 1, dead = dead or :dead where id = :beat;

-- name: lease_take.beat
insert into holdfast_beat (id, ttl, expires_at, solo, session_key, label, host, pid, started, info)
select :beat, :ttl, {now} + :ttl, :solo, :session_key, coalesce(:label, :holder), :host, :pid, coalesce(:started, {now}), :info
 where not exists (select 1 from holdfast_beat where id = :beat);

-- name: lease_take.lease
insert into holdfast_lease (name, kind, holder, beat, token, fence, acquired_at, keep_until, reenter)
values (:name, :kind, :holder, :beat, :token, :fence, {now}, {now} + nullif(:at_least, 0), :reenter)
    on conflict (name) do update set kind = excluded.kind, holder = excluded.holder, beat = excluded.beat, token = excluded.token, fence = excluded.fence,
       acquired_at = excluded.acquired_at, keep_until = excluded.keep_until, kept = 0, reenter = excluded.reenter;

-- name: lease_take.granted
select :status as status, l.fence, :held_by as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name and not b.dead;

-- name: lease.alive
select holder from holdfast_live where name = :name and token = :token;

-- name: lease.stored
-- Whether it has expired or not.
select 1 from holdfast_lease where name = :name and token = :token;

-- name: lease.beat
select beat from holdfast_lease where name = :name;

-- name: lease.record_release
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'released'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: lease.delete
delete from holdfast_lease where name = :name;

-- name: beat.delete
delete from holdfast_beat where id = :beat;

-- name: beat.delete_solo
delete from holdfast_beat where id = :beat and solo;

-- name: beat.change
-- The keeper compares generations, and reads which of its leases are left.
update holdfast_beat set generation = generation + 1 where id = :beat;

-- name: lease_renew.beat
update holdfast_beat set expires_at = {now} + ttl
 where id = (select beat from holdfast_live where name = :name and token = :token) returning 1 as renewed;

-- name: lease_status
select holder, fence, ttl, remaining from holdfast_live where name = :name and token = :token;

-- name: lease_release.lease
select beat, coalesce(keep_until > {now}, 0) as keeps from holdfast_lease where name = :name;

-- name: lease_release.kept_beat
insert or replace into holdfast_beat (id, ttl, expires_at, solo, label, host, pid, started)
select 'kept:' || l.name, max(l.keep_until - {now}, 0.05), l.keep_until, 1, coalesce(b.label, l.holder), b.host, b.pid, coalesce(b.started, {now})
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: lease_release.kept_lease
update holdfast_lease set beat = 'kept:' || name, token = lower(hex(randomblob(16))), keep_until = null, kept = 1 where name = :name;

-- name: lease_force_release.history
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'forced', :actor, :reason
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: lease_force_release.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
select {now}, :actor, 'lease_force_release', name, :reason, fence, json_object('holder', holder), 'done', {now} from holdfast_lease where name = :name;

-- name: lease_force_release_if.lease
select 1 from holdfast_lease where name = :name and fence = :fence;

-- name: lease_recall.lease
select beat from holdfast_live where name = :name and fence = :fence;

-- name: lease_recall.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
select {now}, :actor, 'lease_recall', name, :reason, fence, json_object('holder', holder), 'done', {now} from holdfast_live where name = :name;

-- name: lease_recall.want
update holdfast_beat set generation = generation + 1, wanted = json_insert(coalesce(wanted, '[]'), '$[#]', :fence) where id = :beat;

-- name: lease_clear.expired
select 1 from holdfast_lease where name = :name and name not in (select v.name from holdfast_live v where v.name = :name);

-- name: lease_wipe.kind
select kind, holder from holdfast_live where name = :name and token = :token;

-- name: lease_wipe.history
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'forced', :actor, 'wiped under guard ''' || :name || ''''
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat
 where substr(l.name, 1, length(:prefix)) = :prefix and l.kind not in ('guard', 'elector', 'gate') order by l.name;

-- name: lease_wipe.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
select {now}, holder, 'lease_wipe', name, 'wiped under guard ''' || name || '''', fence, json_object('ended', :ended, 'prefix', :prefix), 'done', {now}
  from holdfast_lease where name = :name;

-- name: lease_wipe.beats
update holdfast_beat set generation = generation + 1 where id in (
    select beat from holdfast_lease where substr(name, 1, length(:prefix)) = :prefix and kind not in ('guard', 'elector', 'gate'));

-- name: lease_wipe.solo_beats
delete from holdfast_beat where solo and id in (
    select beat from holdfast_lease where substr(name, 1, length(:prefix)) = :prefix and kind not in ('guard', 'elector', 'gate'));

-- name: lease_wipe.leases
delete from holdfast_lease where substr(name, 1, length(:prefix)) = :prefix and kind not in ('guard', 'elector', 'gate');

-- name: lease_list
-- Those who want a slot wait for any of its pool, under the pool's name.
select name, kind, holder, fence, acquired_at, expires_at, remaining, host, pid, info,
       holdfast_waiting(case when name like '@slot:%' then substr(name, 1, length(rtrim(name, '0123456789')) - 1) else name end) as waiting
  from holdfast_live
 where :name is null or name = :name order by name;

-- name: lease_held
select holder, remaining from holdfast_live where name = :name and not coalesce(holdfast_gone(session_key), 0);

-- name: lease_history
-- A file has no roles.
select name, holder, null as role, host, pid, fence, acquired_at, ended_at, outcome, actor, reason from holdfast_history
 where :name is null or name = :name order by id desc limit :limit;

-- name: lease_activity
with origin as (select (cast({now} / :step as integer) + 1 - :buckets) * :step as start),
event as (
    select l.acquired_at as at, 'acquired' as kind from holdfast_lease l, origin where not l.kept and l.acquired_at >= start
    union all select h.acquired_at, 'acquired' from holdfast_history h, origin where h.acquired_at >= start
    union all select h.ended_at, h.outcome from holdfast_history h, origin
     where h.ended_at >= start and h.outcome in ('expired', 'session_lost', 'forced'))
select null as bucket, 'start' as kind, start as value from origin
union all select null, 'complete', ended_at from holdfast_history where id = (select min(id) from holdfast_history) and id > 1
union all select cast((at - start) / :step as integer), kind, cast(count(*) as real) from event, origin group by 1, 2;

-- name: probe_expire
-- Without waiting: a transaction here holds up every other.
update holdfast_beat set expires_at = {now} - 0.001 where id = (select beat from holdfast_lease where name = :name);

-- name: beat_renew.update
update holdfast_beat set expires_at = {now} + ttl where id = :beat and not dead and expires_at > {now} returning generation;

-- name: beat_leases
select name, fence from holdfast_lease where beat = :beat;

-- name: beat_release.lease
select 1 from holdfast_lease where name = :name and fence = :fence and beat = :beat;

-- name: beat_wanted
select value as fence from holdfast_beat b, json_each(b.wanted) where b.id = :beat;

-- name: beat_end.history
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'released'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.beat = :beat;

-- name: beat_end.kept_beats
insert or replace into holdfast_beat (id, ttl, expires_at, solo, label, host, pid, started)
select 'kept:' || l.name, max(l.keep_until - {now}, 0.05), l.keep_until, 1, coalesce(b.label, l.holder), b.host, b.pid, coalesce(b.started, {now})
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.beat = :beat and l.keep_until > {now};

-- name: beat_end.kept_leases
update holdfast_lease set beat = 'kept:' || name, token = lower(hex(randomblob(16))), keep_until = null, kept = 1 where beat = :beat and keep_until > {now};

-- name: beat_end.leases
delete from holdfast_lease where beat = :beat;

-- name: purge.expire_beats
update holdfast_beat set dead = 1 where not dead and expires_at <= {now};

-- name: purge.history
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, min(coalesce(b.expires_at, {now}), {now}), 'expired'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where not l.kept and (b.id is null or b.dead);

-- name: purge.leases
delete from holdfast_lease where not exists (select 1 from holdfast_beat b where b.id = beat and not b.dead);

-- name: purge.beats
delete from holdfast_beat where dead;

-- name: purge.old_history
delete from holdfast_history where id <= (select max(id) from holdfast_history) - 10000;

-- name: protect
update holdfast_lease set fence = fence where name = :name and token = :token
   and exists (select 1 from holdfast_live v where v.name = :name and v.token = :token) returning fence;

-- name: fence_raise.entry
select 1 from holdfast_audit where id = :entry and subject = 'fences' and outcome is null;

-- name: fence_raise.fences
update holdfast_fence set last = max(last, :above, (select micros from holdfast_clock) + 60000000) returning last as fence;

-- name: fence_raise.versions
update holdfast_object_version set first = max(first, :above, (select micros from holdfast_clock) + 60000000);
