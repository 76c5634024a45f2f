-- What operators do to others' work: who, why, what, and the outcome. The row is written before the action, so that no action
-- is without a record; a row without an outcome means that the outcome is unknown.
create table holdfast.audit (
    id       bigint generated always as identity primary key,
    at       timestamptz not null default clock_timestamp(),
    actor    text not null,
    role     text not null,
    action   text not null,
    subject  text not null,
    reason   text not null,
    detail   jsonb check (pg_column_size(detail) <= 1048576),
    outcome  text,
    ended_at timestamptz
);
comment on column holdfast.audit.actor is 'the name that the operator gave';
comment on column holdfast.audit.role is 'the database role of the session';

create function holdfast.audit_begin(action text, subject text, actor text, reason text, detail jsonb default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    entry bigint;
begin
    perform holdfast.check_name('action', action);
    perform holdfast.check_name('subject', subject);
    perform holdfast.check_name('actor', actor);
    if coalesce(length(reason), 0) not between 1 and 1000 then
        raise exception 'reason must have 1 to 1000 characters' using errcode = 'invalid_parameter_value';
    end if;
    insert into holdfast.audit (actor, role, action, subject, reason, detail) values (actor, session_user, action, subject, reason, detail)
    returning id into entry;
    return entry;
end $$;

-- Once per entry, and only by the role that began it.
create function holdfast.audit_end(entry bigint, outcome text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.check_name('outcome', outcome);
    update holdfast.audit a set outcome = audit_end.outcome, ended_at = clock_timestamp()
     where a.id = entry and a.outcome is null and a.role = session_user;
    return found;
end $$;

-- What the numbers in pg_locks stand for, holdfast's own locks included. A foreign namespace stays a number; an unknown key has
-- no name.
create function holdfast.lock_label(classid oid, objid oid, objsubid smallint)
returns table (namespace text, entity_id bigint, name text)
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    first bigint := classid::bigint << 32 >> 32;
begin
    if objsubid = 2 then
        entity_id := objid::bigint << 32 >> 32;
        if first in (hashtext('holdfast.free'), hashtext('holdfast.take')) then
            name := case first when hashtext('holdfast.free') then 'waiter of ' else 'acquire of ' end
                    || coalesce((select 'lease ' || l.name from holdfast.lease l where hashtext(l.name) = lock_label.entity_id limit 1),
                                'a lease or a slot');
        else
            namespace := coalesce((select n.name from holdfast.lock_namespace n where n.id = first), first::text);
        end if;
    else
        entity_id := classid::bigint << 32 | objid::bigint;
        name := coalesce((select n.name from holdfast.lock_name n where n.key = entity_id),
                         (select 'session of ' || b.label from holdfast.beat b where b.session_key = entity_id and entity_id >> 48 = 7845 limit 1),
                         case entity_id when hashtext('holdfast.migrate') then 'migration' end,
                         case entity_id >> 48 when 7845 then 'session without a lease' when 7846 then 'owner of operations' when 7847 then 'operation in a transaction' end);
                         -- the prefixes of the keeper's keys and of operations
    end if;
    return next;
end $$;

-- Not SECURITY DEFINER: the caller needs the privilege to end the session.
create function holdfast.lock_end_session(pid integer) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if lock_end_session.pid = pg_backend_pid() then
        return 'refused: it is the caller''s own session';
    end if;
    if not exists (select from pg_locks l where l.pid = lock_end_session.pid and l.locktype = 'advisory'
                      and l.database = (select d.oid from pg_database d where d.datname = current_database())) then
        return 'refused: it neither holds nor waits for an advisory lock in this database';
    end if;
    return case when pg_terminate_backend(lock_end_session.pid, 5000) then 'ended' else 'signalled, but still running after 5 s' end;
exception when insufficient_privilege then
    return 'refused: ' || left(sqlerrm, 180);
end $$;

revoke all on function holdfast.audit_begin(text, text, text, text, jsonb), holdfast.audit_end(bigint, text),
                       holdfast.lock_label(oid, oid, smallint), holdfast.lock_end_session(integer) from public;

insert into holdfast.schema_version (version, name) values (3, 'audit');
