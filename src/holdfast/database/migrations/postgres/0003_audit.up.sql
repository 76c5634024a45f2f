-- What operators do to others' work: who, why, what, and the outcome. There are two kinds of entries:
--   * An SQL function that acts on others' work writes its entry itself, in the same transaction (audit_act). The action is the name of
--     the function, or of what it did, such as lease_force_release. Nothing else can write such an entry.
--   * What is not one transaction (a command, a window, the end of a session) has an entry that is begun before it and ended after it.
--     The action has a dot, such as lease.release. Without an outcome, it is under way or the outcome is unknown.
create table holdfast.audit (
    id       bigint generated always as identity primary key,
    at       timestamptz not null default clock_timestamp(),
    actor    text not null,
    role     text not null,
    action   text not null,
    subject  text not null,
    reason   text not null,
    fence    bigint,
    detail   jsonb check (pg_column_size(detail) <= 1048576),
    outcome  text,
    ended_at timestamptz,
    begun_in xid8 not null default pg_current_xact_id()
);
comment on column holdfast.audit.actor is 'the name that the operator gave';
comment on column holdfast.audit.role is 'the database role of the session';
comment on column holdfast.audit.fence is 'of the lease that was taken away, or under which the action was done';

create index audit_open on holdfast.audit (id) where outcome is null;

create function holdfast.audit_check(actor text, reason text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.check_name('actor', actor);
    if coalesce(length(reason), 0) not between 1 and 1000 then
        raise exception 'reason must have 1 to 1000 characters' using errcode = 'invalid_parameter_value';
    end if;
end $$;

-- The entry of an act, or of one that is refused, written by the function that acts, in its transaction. No role may call it.
create function holdfast.audit_act(
    action text, subject text, actor text, reason text, fence bigint, detail jsonb, outcome text default 'done') returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform holdfast.audit_check(actor, reason);
    insert into holdfast.audit (actor, role, action, subject, reason, fence, detail, outcome, ended_at)
    values (actor, session_user, action, subject, reason, fence, detail, outcome, clock_timestamp());
end $$;

create function holdfast.audit_begin(action text, subject text, actor text, reason text, detail jsonb default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    entry bigint;
begin
    perform holdfast.check_name('action', action);
    if position('.' in action) = 0 then
        raise exception 'action must contain a dot, not %: others are for acts that the database records itself', quote_literal(action)
            using errcode = 'invalid_parameter_value';
    end if;
    perform holdfast.check_name('subject', subject);
    perform holdfast.audit_check(actor, reason);
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
                                (select 'lease ' || h.name from holdfast.history h where hashtext(h.name) = lock_label.entity_id limit 1),
                                'a lease or a slot');
        else
            namespace := coalesce((select n.name from holdfast.lock_namespace n where n.id = first), first::text);
        end if;
    else
        entity_id := classid::bigint << 32 | objid::bigint;
        name := coalesce((select n.name from holdfast.lock_name n where n.key = entity_id),
                         (select 'session of ' || b.label from holdfast.beat b where b.session_key = entity_id and entity_id >> 48 = 7845 limit 1),
                         case entity_id >> 48 when 7848 then 'transaction under ' || coalesce(
                             (select 'lease ' || l.name from holdfast.lease l where holdfast.protect_key(l.name) = entity_id limit 1), 'a lease') end,
                         case entity_id when hashtext('holdfast.migrate') then 'migration' end,
                         case entity_id >> 48 when 7845 then 'session without a lease' when 7846 then 'owner of operations' when 7847 then 'operation in a transaction' end);
                         -- the prefixes of the keeper's keys and of operations
    end if;
    return next;
end $$;

-- Whether an entry is under way, of this role and subject, and committed: written by another transaction than this one, so that no
-- rollback undoes it.
create function holdfast.audit_stands(entry bigint, subject text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    return exists (select from holdfast.audit a
                    where a.id = entry and a.subject = audit_stands.subject and a.outcome is null and a.role = session_user
                      and a.begun_in <> pg_current_xact_id());
end $$;

-- Not SECURITY DEFINER: the caller needs the privilege to end the session. A rollback does not undo it, so its entry in the audit must
-- be committed before: audit_begin('lock.end', 'session <pid>', actor, reason). Afterwards: audit_end(entry, outcome).
create function holdfast.lock_end_session(pid integer, entry bigint) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if not holdfast.audit_stands(entry, 'session ' || pid) then
        return 'refused: first begin an audit entry with the subject ''session ' || pid || ''', and commit it';
    end if;
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

revoke all on function holdfast.audit_check(text, text), holdfast.audit_act(text, text, text, text, bigint, jsonb, text),
                       holdfast.audit_begin(text, text, text, text, jsonb), holdfast.audit_end(bigint, text),
                       holdfast.lock_label(oid, oid, smallint), holdfast.audit_stands(bigint, text),
                       holdfast.lock_end_session(integer, bigint) from public;

insert into holdfast.schema_version (version, name) values (3, 'audit');
