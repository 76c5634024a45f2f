-- Schedules: how far each has come, and what became of each slot. A slot is a time in microseconds since 1970. Which slots there
-- are, and which of them run, is decided by the library; here the clock is read, and one process at a time moves a schedule on.

create table holdfast.schedule (
    name       text collate "C" primary key,
    every      text not null,
    zone       text,
    cursor     bigint not null,
    paused     text,
    created_at timestamptz not null default clock_timestamp()
);
comment on column holdfast.schedule.every is 'the interval in microseconds; a cron expression if there is a zone; "once"';
comment on column holdfast.schedule.cursor is 'every slot up to here has a row, or is in the range of one';
comment on column holdfast.schedule.paused is 'who paused it, and why';

create table holdfast.schedule_slot (
    name       text collate "C" not null references holdfast.schedule on delete cascade,
    slot       bigint not null,
    until      bigint not null,
    count      int not null,
    status     text not null check (status in ('open', 'success', 'failure', 'skipped')),
    reason     text,
    attempt    int not null,
    owner      text,
    taken_at   timestamptz not null,
    started_at timestamptz,
    ended_at   timestamptz,
    note       text,
    primary key (name, slot)
);
comment on column holdfast.schedule_slot.until is 'the last slot of a range that was skipped for one reason';
comment on column holdfast.schedule_slot.count is 'the slots of the range; 2001: more than 2000';
comment on column holdfast.schedule_slot.taken_at is 'when a process opened it, or began its last attempt';
create index schedule_slot_open on holdfast.schedule_slot (name) where status = 'open';

create function holdfast.schedule_micros(at timestamptz default clock_timestamp()) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return (extract(epoch from at) * 1000000)::bigint;
end $$;

-- Add those that are not there. wanted: [[name, every, zone, cursor]]; a cursor that is null is now.
create function holdfast.schedule_register(wanted jsonb) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.check_name('name', e ->> 0) from jsonb_array_elements(wanted) e;
    insert into holdfast.schedule (name, every, zone, cursor)
    select e ->> 0, e ->> 1, e ->> 2, coalesce((e ->> 3)::bigint, holdfast.schedule_micros()) from jsonb_array_elements(wanted) e order by e ->> 0
    on conflict do nothing;
end $$;

-- Give a schedule another timetable, from now on. False if it has another one than expected, or has moved on.
create function holdfast.schedule_change(name text, expected bigint, every text, zone text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.schedule s set every = schedule_change.every, zone = schedule_change.zone, cursor = greatest(s.cursor, holdfast.schedule_micros())
     where s.name = schedule_change.name and s.cursor = expected;
    return found;
end $$;

-- The state of schedules; null: of all, and with what became of the last slot of each. opens: [[slot, attempt, taken_at]] of those
-- that are not settled.
create function holdfast.schedule_look(names jsonb)
returns table (name text, every text, zone text, cursor bigint, paused text, opens text, last text, now bigint)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query
    select s.name, s.every, s.zone, s.cursor, s.paused, o.opens::text,
           case when names is null then (select to_json(x)::text from (
               select p.slot, p.until, p.count, p.status, p.reason, p.attempt, p.owner, extract(epoch from p.started_at) as started_at,
                      extract(epoch from p.ended_at) as ended_at, p.note
                 from holdfast.schedule_slot p where p.name = s.name and p.status <> 'open' order by p.slot desc limit 1) x) end,
           holdfast.schedule_micros(clock_timestamp())
      from holdfast.schedule s
      left join (select p.name, json_agg(json_build_array(p.slot, p.attempt, holdfast.schedule_micros(p.taken_at)) order by p.slot) as opens
                   from holdfast.schedule_slot p where p.status = 'open' group by p.name) o on o.name = s.name
     where names is null or names ? s.name order by s.name;
end $$;

-- Move a schedule on to ``cursor``, record the slots that are skipped (skips: [[first, last, count, reason]]) and open ``slot``, unless that
-- is null. state: taken | skipped (an operator skipped the slot before) | done (no slot) | moved (another process was first) | early | paused | resumed |
-- full (``overlap`` slots are open) | gone.
create function holdfast.schedule_advance(
    name text, expected bigint, cursor bigint, skips jsonb, slot bigint, overlap int, owner text, out state text, out now bigint, out reached bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    at timestamptz;
    is_paused boolean;
    skip jsonb;
begin
    select s.cursor, s.paused is not null into reached, is_paused from holdfast.schedule s where s.name = schedule_advance.name for update;
    at := clock_timestamp();
    now := holdfast.schedule_micros(at);
    state := case when reached is null then 'gone' when reached <> expected then 'moved' when cursor > now then 'early'
                  when slot is not null and is_paused then 'paused'
                  when skips -> 0 ->> 3 = 'paused' and not is_paused then 'resumed'
                  when slot is not null and overlap <= (select count(*) from holdfast.schedule_slot p where p.name = schedule_advance.name and p.status = 'open')
                  then 'full' end;
    if state is not null then
        return;
    end if;
    for skip in select * from jsonb_array_elements(skips) loop
        update holdfast.schedule_slot p set until = (skip ->> 1)::bigint, count = least(p.count + (skip ->> 2)::int, 2001), ended_at = at
         where p.name = schedule_advance.name and p.status = 'skipped' and p.reason = skip ->> 3 and p.until = reached
           and p.slot = (select max(x.slot) from holdfast.schedule_slot x where x.name = schedule_advance.name and x.slot <= reached);
        if not found then
            insert into holdfast.schedule_slot (name, slot, until, count, status, reason, attempt, owner, taken_at, ended_at)
            values (name, (skip ->> 0)::bigint, (skip ->> 1)::bigint, (skip ->> 2)::int, 'skipped', skip ->> 3, 0, owner, at, at) on conflict do nothing;
        end if;
    end loop;
    state := 'done';
    if slot is not null then
        insert into holdfast.schedule_slot (name, slot, until, count, status, attempt, owner, taken_at)
        values (name, slot, slot, 1, 'open', 0, owner, at) on conflict do nothing;
        state := case when found then 'taken' else 'skipped' end;
        if random() < 0.02 then
            delete from holdfast.schedule_slot p where p.name = schedule_advance.name and p.status <> 'open'
               and p.slot < (select x.slot from holdfast.schedule_slot x where x.name = schedule_advance.name order by x.slot desc offset 1000 limit 1);
        end if;
    end if;
    update holdfast.schedule s set cursor = schedule_advance.cursor where s.name = schedule_advance.name;
    reached := cursor;
end $$;

-- Begin the next attempt of an open slot, for the owner of its operation. attempt: null if the slot is not open. previous: the last
-- run before it.
create function holdfast.schedule_take(name text, slot bigint, owner text, out attempt int, out now bigint, out previous text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    at timestamptz := clock_timestamp();
begin
    update holdfast.schedule_slot p set attempt = p.attempt + 1, owner = schedule_take.owner, taken_at = at, started_at = coalesce(p.started_at, at)
     where p.name = schedule_take.name and p.slot = schedule_take.slot and p.status = 'open' returning p.attempt into attempt;
    now := holdfast.schedule_micros(at);
    select to_json(x)::text into previous from (
        select p.slot, p.until, p.count, p.status, p.reason, p.attempt, p.owner, extract(epoch from p.started_at) as started_at,
               extract(epoch from p.ended_at) as ended_at, p.note
          from holdfast.schedule_slot p where p.name = schedule_take.name and p.slot < schedule_take.slot and p.status in ('success', 'failure')
         order by p.slot desc limit 1) x;
end $$;

-- Record what became of an open slot, if its attempt is still that one. status "open": put it back, after a failure.
create function holdfast.schedule_settle(name text, slot bigint, attempt int, status text, reason text, note text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if schedule_settle.status = 'open' then
        update holdfast.schedule_slot p set status = 'open', reason = null, taken_at = clock_timestamp(), ended_at = null
         where p.name = schedule_settle.name and p.slot = schedule_settle.slot and p.status = 'failure' and p.attempt = schedule_settle.attempt;
    else
        update holdfast.schedule_slot p set status = schedule_settle.status, reason = coalesce(schedule_settle.reason, p.reason), note = schedule_settle.note,
               ended_at = clock_timestamp()
         where p.name = schedule_settle.name and p.slot = schedule_settle.slot and p.status = 'open' and p.attempt = schedule_settle.attempt;
    end if;
    return found;
end $$;

-- The slots of a schedule that were run or skipped, the latest first.
create function holdfast.schedule_slots(name text, only_slot bigint, only_runs boolean, max_rows int)
returns table (slot bigint, until bigint, count int, status text, reason text, attempt int, owner text, started_at double precision,
               ended_at double precision, note text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
    return query
    select p.slot, p.until, p.count, p.status, p.reason, p.attempt, p.owner, extract(epoch from p.started_at)::double precision,
           extract(epoch from p.ended_at)::double precision, p.note
      from holdfast.schedule_slot p
     where p.name = schedule_slots.name and (only_slot is null or p.slot = only_slot) and (not only_runs or p.status in ('success', 'failure'))
     order by p.slot desc limit max_rows;
end $$;

-- How late the slots of each bucket began, at most. Rows without a bucket: as those of lease_activity.
create function holdfast.schedule_activity(step double precision, buckets integer)
returns table (bucket integer, kind text, value double precision)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    start double precision := holdfast.activity_start(step, buckets);
begin
    return query select null::integer, 'start', start;
    return query
    select floor((p.slot / 1000000.0 - start) / step)::integer, 'late', max(extract(epoch from p.started_at)::double precision - p.slot / 1000000.0)
      from holdfast.schedule s cross join lateral (  -- OFFSET 0: by key, since a schedule has few slots in the window
           select x.slot, x.started_at from holdfast.schedule_slot x where x.name = s.name and x.slot >= start * 1000000 and x.started_at is not null offset 0) p
     group by 1;
end $$;

-- For operators. Each writes its entry in the audit.
create function holdfast.schedule_pause(name text, paused boolean, actor text, reason text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.schedule s set paused = case when schedule_pause.paused then 'by ' || actor || ': ' || reason end where s.name = schedule_pause.name;
    if not found then
        return false;
    end if;
    perform holdfast.audit_act(case when paused then 'schedule_pause' else 'schedule_resume' end, name, actor, reason, null, null);
    return true;
end $$;

-- Skip a slot that has not begun. slot null: open one now, beside those of the timetable. The slot; null if there is nothing to do.
create function holdfast.schedule_order(name text, slot bigint, actor text, reason text) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
    at timestamptz := clock_timestamp();
    ordered bigint := coalesce(slot, holdfast.schedule_micros(at));
begin
    perform from holdfast.schedule s where s.name = schedule_order.name for update;
    if not found then
        return null;
    end if;
    insert into holdfast.schedule_slot as p (name, slot, until, count, status, reason, attempt, taken_at, ended_at)
    values (name, ordered, ordered, 1, case when slot is null then 'open' else 'skipped' end,
            case when slot is null then 'ordered ' else '' end || 'by ' || actor || ': ' || reason, 0, at, case when slot is not null then at end)
    on conflict on constraint schedule_slot_pkey do update set status = 'skipped', reason = excluded.reason, ended_at = at
     where slot is not null and p.status = 'open' and p.attempt = 0;
    if not found then
        return null;
    end if;
    perform holdfast.audit_act(case when slot is null then 'schedule_run' else 'schedule_skip' end, name, actor, reason, null,
                               jsonb_build_object('slot', ordered));
    return ordered;
end $$;

create function holdfast.schedule_remove(name text, actor text, reason text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from holdfast.schedule s where s.name = schedule_remove.name;
    if not found then
        return false;
    end if;
    perform holdfast.audit_act('schedule_remove', name, actor, reason, null, null);
    return true;
end $$;

revoke all on function holdfast.schedule_micros(timestamptz), holdfast.schedule_register(jsonb), holdfast.schedule_change(text, bigint, text, text), holdfast.schedule_look(jsonb),
                       holdfast.schedule_advance(text, bigint, bigint, jsonb, bigint, int, text), holdfast.schedule_take(text, bigint, text),
                       holdfast.schedule_settle(text, bigint, int, text, text, text), holdfast.schedule_slots(text, bigint, boolean, int),
                       holdfast.schedule_activity(double precision, integer),
                       holdfast.schedule_pause(text, boolean, text, text), holdfast.schedule_order(text, bigint, text, text), holdfast.schedule_remove(text, text, text)
    from public;

insert into holdfast.schema_version (version, name) values (9, 'schedule');
