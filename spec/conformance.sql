-- Conformance of the SQL functions of docs/reference/sql.md: what a client in any language may rely on, case by case.
--
--     psql -X -d app -f spec/conformance.sql               (another schema: -v schema=tenant_a)
--
-- Each case prints a line that begins with "ok". The first one that does not hold ends psql with exit status 3. A client in
-- another language conforms if it makes the same calls and gets the same answers.
-- The role needs what docs/howto/roles-and-poolers.md grants a worker, and TEMPORARY on the database. As an operator it runs more
-- cases. All names begin with "conformance" and a random number. Only entries of the history and of the audit stay.

\set ON_ERROR_STOP on
\set QUIET on
\pset tuples_only on
\pset format unaligned
\pset pager off
\if :{?schema}
\else
    \set schema holdfast
\endif
set search_path = :"schema";
select 'conformance ' || gen_random_uuid() as name \gset
select gen_random_uuid() as one, gen_random_uuid() as two, gen_random_uuid() as three \gset

create function pg_temp.expect(what text, holds boolean) returns text language plpgsql as $$
begin
    if holds is not true then
        raise exception 'not ok - %', what;
    end if;
    return 'ok - ' || what;
end $$;

-- The SQLSTATE with which a statement fails. It runs in a savepoint.
create function pg_temp.sqlstate_of(statement text) returns text language plpgsql as $$
begin
    execute statement;
    return 'success';
exception when others then
    return sqlstate;
end $$;

-- Wait until a statement returns true. The script waits for an event, and never for a span of time.
create procedure pg_temp.wait_until(statement text) language plpgsql as $$
declare
    holds boolean;
begin
    for attempt in 1..6000 loop
        execute statement into holds;
        exit when holds;
        commit;
        perform pg_sleep(0.01);
    end loop;
end $$;

select pg_temp.expect('version 1 of the functions', sql_version() = 1);

\echo '# leases'

select pg_temp.expect('lease_try: a free lease is granted', lease_try(:'name', 'A', :'one', 30));
select pg_temp.expect('lease_try: a repeated request gets the same answer', lease_try(:'name', 'A', :'one', 30));
select pg_temp.expect('lease_try: another holder is refused', not lease_try(:'name', 'B', :'two', 30));
select pg_temp.expect('lease_try: the label of the holder is no proof', not lease_try(:'name', 'A', :'two', 30));
select pg_temp.expect('lease_try: without a token, 22023',
    pg_temp.sqlstate_of(format('select lease_try(%L, %L, null, 30)', :'name', 'A')) = '22023');
select pg_temp.expect('lease_try: a bad name or TTL, 22023', bool_and(pg_temp.sqlstate_of(statement) = '22023')) from (values
    (format('select lease_try(%L, %L, %L, 30)', '', 'A', :'one')), (format('select lease_try(%L, %L, %L, 30)', repeat('x', 201), 'A', :'one')),
    (format('select lease_try(%L, %L, %L, 30)', '@gate:x', 'A', :'one')), (format('select lease_try(%L, %L, %L, 30)', 'holdfast:x', 'A', :'one')),
    (format('select lease_try(%L, %L, %L, 30)', E'a\nb', 'A', :'one')), (format('select lease_try(%L, %L, %L, 30)', :'name', '', :'one')),
    (format('select lease_try(%L, %L, %L, 0.04)', :'name', 'A', :'one')), (format('select lease_try(%L, %L, %L, 86401)', :'name', 'A', :'one'))
    ) cases (statement);

select pg_temp.expect('lease_acquire: a held lease is refused with its holder, and shows no token',
    status = 'held' and token is null and fence is null and held_by = 'A' and remaining > 0 and remaining <= 30)
  from lease_acquire(:'name', 'B', 30);
select fence from lease_status(:'name', :'one') \gset
select pg_temp.expect('lease_status: holder, fence and TTL', holder = 'A' and fence > 0 and ttl = 30 and remaining > 0 and remaining <= 30)
  from lease_status(:'name', :'one');
select pg_temp.expect('lease_status: no row for another token', not exists (select from lease_status(:'name', :'two')));
select pg_temp.expect('lease_renew: true with the token', lease_renew(:'name', :'one'));
select pg_temp.expect('lease_renew: false with another', not lease_renew(:'name', :'two'));
select pg_temp.expect('lease_list: the holder, not the token', count(*) = 1 and min(l.holder) = 'A' and min(l.fence) = :fence
    and position(:'one' in string_agg(l::text, '')) = 0) from lease_list(:'name') l;

begin;
select pg_temp.expect('lease_protect: returns the fence', lease_protect(:'name', :'one') = :fence);
commit;
begin;
select pg_temp.expect('lease_protect: HF001 with another token',
    pg_temp.sqlstate_of(format('select lease_protect(%L, %L)', :'name', :'two')) = 'HF001');
select pg_temp.expect('lease_protect: HF002 in a savepoint',
    pg_temp.sqlstate_of(format('select lease_protect(%L, %L)', :'name', :'one')) = 'HF002');
select pg_temp.expect('lease_protect_at_commit: HF002 in a savepoint',
    pg_temp.sqlstate_of(format('select lease_protect_at_commit(%L, %L)', :'name', :'one')) = 'HF002');
rollback;

select pg_temp.expect('lease_release: false for another holder', not lease_release(:'name', 'B', :'one'));
select pg_temp.expect('lease_release: false for another token', not lease_release(:'name', 'A', :'two'));
select pg_temp.expect('lease_release: true for holder and token', lease_release(:'name', 'A', :'one'));
select pg_temp.expect('lease_release: false the second time', not lease_release(:'name', 'A', :'one'));
select pg_temp.expect('lease_history: the release', holder = 'A' and fence = :fence and outcome = 'released')
  from lease_history(:'name') limit 1;

select lease_try(:'name', 'A', :'one', 0.05) as granted \gset
call pg_temp.wait_until(format('select not exists (select from lease_status(%L, %L))', :'name', :'one'));
select status, token, fence as later, held_by from lease_acquire(:'name', 'B', 30) \gset
select pg_temp.expect('lease_acquire: an expired lease is taken over, with a higher fence',
    :'status' = 'taken_over' and :'held_by' = 'A' and :later > :fence);
select pg_temp.expect('lease_renew: false once it was taken over', not lease_renew(:'name', :'one'));
select pg_temp.expect('lease_release: false once it was taken over', not lease_release(:'name', 'A', :'one'));
begin;
select pg_temp.expect('lease_protect: HF001 once it was taken over',
    pg_temp.sqlstate_of(format('select lease_protect(%L, %L)', :'name', :'one')) = 'HF001');
rollback;

begin;
select pg_temp.expect('lease_protect_at_commit: returns the fence', lease_protect_at_commit(:'name', :'token') = :later);
select pg_temp.expect('lease_release: with NULL for the holder, the token decides', lease_release(:'name', null, :'token'));
\warn 'The next error is expected.'
\set ON_ERROR_STOP off
commit;
\set ON_ERROR_STOP on
select pg_temp.expect('lease_protect_at_commit: HF001 out of COMMIT', :'LAST_ERROR_SQLSTATE' = 'HF001');
select pg_temp.expect('and the transaction did not happen', lease_release(:'name', 'B', :'token'));

\echo '# locks'

select pg_temp.expect('lock_key: the same number for the same name', lock_key(:'name') = lock_key(:'name') and lock_key('a') <> lock_key('b'));

\echo '# slots'

select slot, token, fence from slot_claim(:'name', 2, 'A', 30) \gset
select pg_temp.expect('slot_claim: the lowest free slot', :slot = 1 and :fence > 0);
select slot as other, token as others from slot_claim(:'name', 2, 'A', 30) \gset
select pg_temp.expect('slot_claim: one owner may have several', :other = 2);
select pg_temp.expect('slot_claim: when all are taken, held and no token', status = 'held' and slot is null and token is null and fence is null
    and held_by = 'A' and remaining > 0) from slot_claim(:'name', 2, 'B', 30);
select pg_temp.expect('slot_claim: a larger capacity has one more', c.slot = 3 and slot_release(:'name', c.slot, c.token)) from slot_claim(:'name', 3, 'B', 30) c;
select pg_temp.expect('slot_claim: a bad pool or capacity, 22023', bool_and(pg_temp.sqlstate_of(statement) = '22023')) from (values
    (format('select slot_claim(%L, 1, %L, 30)', repeat('x', 181), 'A')), (format('select slot_claim(%L, 0, %L, 30)', :'name', 'A'))) cases (statement);
select pg_temp.expect('slot_claim: a repeated request gets the same slot', c.slot = 1 and c.fence = :fence)
  from slot_claim(:'name', 2, 'A', 30, token => :'token') c;
select pg_temp.expect('slot_list: the slots that are held', array_agg(slot order by slot) = '{1,2}' and min(holder) = 'A') from slot_list(:'name');
select pg_temp.expect('slot_renew: true with the token of this slot', slot_renew(:'name', :slot, :'token'));
select pg_temp.expect('slot_renew: false with that of another', not slot_renew(:'name', :slot, :'others'));
select pg_temp.expect('slot_release: false with that of another', not slot_release(:'name', :slot, :'others'));
select pg_temp.expect('slot_release: true, then false', slot_release(:'name', :slot, :'token'));
select pg_temp.expect('slot_release: true, then false', not slot_release(:'name', :slot, :'token'));
select pg_temp.expect('slot_release: of the other', slot_release(:'name', :other, :'others'));

\echo '# gates'

select left(:'name', 60) as gate \gset
create temporary table setting (value text);
create trigger behind_the_gate before insert or update or delete on setting for each row execute function gate_trigger(:'gate');
create trigger without_a_gate before truncate on setting execute function gate_trigger();
select pg_temp.expect('gate_require: HF004 while it is closed', pg_temp.sqlstate_of(format('select gate_require(%L)', :'gate')) = 'HF004');
select pg_temp.expect('gate_trigger: HF004', pg_temp.sqlstate_of('insert into setting values (1)') = 'HF004');
select pg_temp.expect('gate_trigger: 22023 where it names no gate', pg_temp.sqlstate_of('truncate setting') = '22023');
select has_function_privilege('gate_open(text, double precision, text, text, uuid, jsonb)', 'execute') as operator \gset
\if :operator
select status, fence from gate_open(:'gate', 60, 'jane', 'conformance', :'one') \gset
select pg_temp.expect('gate_open: a closed gate is opened', :'status' = 'acquired' and :fence > 0);
select pg_temp.expect('gate_open: a repeated request gets the same answer', g.fence = :fence) from gate_open(:'gate', 60, 'jane', 'conformance', :'one') g;
select pg_temp.expect('gate_open: an open gate is refused, also to the same actor', status = 'held' and fence is null and held_by = 'jane' and remaining > 0)
  from gate_open(:'gate', 60, 'jane', 'conformance');
select pg_temp.expect('gate_require: the fence while it is open', gate_require(:'gate') = :fence);
begin read only;
select pg_temp.expect('gate_require: also in a transaction that only reads', gate_require(:'gate') = :fence);
rollback;
insert into setting values (1);
update setting set value = 2;
select pg_temp.expect('gate_trigger: lets the row through', array_agg(value) = '{2}') from setting;
delete from setting;
select pg_temp.expect('gate_trigger: lets the row go', not exists (select from setting));
select pg_temp.expect('gate_open and gate_close: without a reason, or for a bad time, 22023', bool_and(pg_temp.sqlstate_of(statement) = '22023'))
  from (values (format('select gate_open(%L, 60, %L, %L)', :'gate', 'jane', '')), (format('select gate_open(%L, 0.5, %L, %L)', :'gate', 'jane', 'x')),
               (format('select gate_close(%L, %L, %L)', :'gate', '', 'x'))) cases (statement);
select pg_temp.expect('gate_close: closed', gate_close(:'gate', 'joe', 'conformance') = 'closed');
select pg_temp.expect('gate_require: HF004 once it is closed', pg_temp.sqlstate_of(format('select gate_require(%L)', :'gate')) = 'HF004');
select pg_temp.expect('gate_close: not_open the second time', gate_close(:'gate', 'joe', 'conformance') = 'not_open');
\else
select pg_temp.expect('gate_open and gate_close: 42501 for a worker', bool_and(pg_temp.sqlstate_of(statement) = '42501')) from (values
    (format('select gate_open(%L, 60, %L, %L)', :'gate', 'jane', 'x')), (format('select gate_close(%L, %L, %L)', :'gate', 'jane', 'x'))) cases (statement);
\endif

\echo '# objects'

select status, version from object_put_if('conformance', :'name', '{"n": 1}', 0, name => :'name', labels => '{"team": "a"}') \gset
select pg_temp.expect('object_put_if: 0 creates', :'status' = 'done' and :version > 0);
select pg_temp.expect('object_put_if: 0 is refused where it exists', status = 'exists' and current = :version)
  from object_put_if('conformance', :'name', '{"n": 2}', 0);
select pg_temp.expect('object_put_if: an older version is refused', status = 'conflict' and current = :version)
  from object_put_if('conformance', :'name', '{"n": 2}', :version - 1);
select pg_temp.expect('object_get: what was written', body = '{"n": 1}' and raw is null and name = :'name' and labels = '{"team": "a"}'
    and version = :version and created_at = updated_at) from object_get('conformance', :'name');
select status, version as second from object_put_if('conformance', :'name', '{"n": 2}', :version) \gset
select pg_temp.expect('object_put_if: its version is replaced by a higher one', :'status' = 'done' and :second > :version);
select pg_temp.expect('object_put_if: name and labels stay', body = '{"n": 2}' and name = :'name' and labels = '{"team": "a"}')
  from object_get('conformance', :'name');
select pg_temp.expect('object_put_if: a name is unique in its type', status = 'taken' and owner = :'name' and current = :second)
  from object_put_if('conformance', :'name' || ' 2', '1', 0, name => :'name');
select pg_temp.expect('object_get_by_name', id = :'name') from object_get_by_name('conformance', :'name');
select pg_temp.expect('object_list: by label', array_agg(id) = array[:'name']) from object_list('conformance', '{"team": "a"}')
 where id like :'name' || '%';
begin;
select pg_temp.expect('object_put_if: a refusal is no error', status = 'conflict') from object_put_if('conformance', :'name', '3', 1);
select pg_temp.expect('object_put_if: so the transaction goes on', status = 'done') from object_put_if('conformance', :'name', '3', :second);
rollback;
select pg_temp.expect('object_put_if: a rollback undoes the write', version = :second) from object_get('conformance', :'name');

select status, version from object_put_if('conformance', :'name', '4', :second, token => :'three') \gset
select pg_temp.expect('object_put_if: a repeated request does not write twice', p.status = 'done' and p.version = :version)
  from object_put_if('conformance', :'name', '4', :second, token => :'three', again => true) p;
select pg_temp.expect('object_put_if: -1 writes in any case', status = 'done' and version > :version) from object_put_if('conformance', :'name', '5', -1);
select pg_temp.expect('object_put_if: bytes', status = 'done') from object_put_if('conformance', :'name', null, -1, name => '', raw => '\x00ff');
select pg_temp.expect('object_get: bytes, and '''' has removed the name', body is null and raw = '\x00ff' and name is null)
  from object_get('conformance', :'name');
select pg_temp.expect('object_put_if: no condition, a bad payload or a bad label, 22023', bool_and(pg_temp.sqlstate_of(statement) = '22023'))
  from (values (format('select object_put_if(%L, %L, %L, null)', 'conformance', :'name', '1')),
               (format('select object_put_if(%L, %L, null, -1)', 'conformance', :'name')),
               (format('select object_put_if(%L, %L, %L, -1)', 'conformance', :'name', to_json(repeat('x', 1048576)))),
               (format('select object_put_if(%L, %L, %L, -1, labels => %L)', 'conformance', :'name', '1', '{"a": 1}')),
               (format('select object_put_if(%L, %L, %L, -1)', 'conformance', '', '1'))) cases (statement);
select pg_temp.expect('object_put_if: text that is not JSON, 22P02',
    pg_temp.sqlstate_of(format('select object_put_if(%L, %L, %L, -1)', 'conformance', :'name', '{')) = '22P02');

select lease_try(:'name', 'A', :'one', 30) as granted \gset
select version from object_get('conformance', :'name') \gset
select pg_temp.expect('object_put_if: under a lease that is held', status = 'done')
  from object_put_if('conformance', :'name', '6', :version, lease => :'name', lease_token => :'one');
select version from object_get('conformance', :'name') \gset
select pg_temp.expect('object_put_if and object_delete_if: under a lease of another, HF001', bool_and(pg_temp.sqlstate_of(statement) = 'HF001'))
  from (values (format('select object_put_if(%L, %L, %L, %s, lease => %L, lease_token => %L)', 'conformance', :'name', '7', :version, :'name', :'two')),
               (format('select object_delete_if(%L, %L, %s, lease => %L, lease_token => %L)', 'conformance', :'name', :version, :'name', :'two'))
       ) cases (statement);
select lease_release(:'name', 'A', :'one') as released \gset

select pg_temp.expect('object_delete_if: an older version is refused', status = 'conflict' and current = :version)
  from object_delete_if('conformance', :'name', :version - 1);
select pg_temp.expect('object_delete_if: its version is deleted', status = 'done') from object_delete_if('conformance', :'name', :version);
select pg_temp.expect('object_get: no row', not exists (select from object_get('conformance', :'name')));
select pg_temp.expect('object_delete_if: where there is none, current is null', status = 'conflict' and current is null)
  from object_delete_if('conformance', :'name', :version);

\echo '# all cases hold'
