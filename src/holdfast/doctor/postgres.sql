-- name: examine_role
-- The privileges of the role, and whether the schema exists. Every role may run it.
select current_user::text as role, to_regnamespace(:schema) is not null as there,
       coalesce(has_schema_privilege(to_regnamespace(:schema)::oid, 'usage'), false) as usage,
       pg_has_role('pg_read_all_stats', 'usage') as sees_all

-- name: examine_provider
-- Providers are recognised by the role of their administrators, which every role may see.
select version() as version,
       (select min(rolname::text) from pg_roles
         where rolname in ('rds_superuser', 'cloudsqlsuperuser', 'alloydbsuperuser', 'azure_pg_admin', 'neon_superuser', 'supabase_admin')
       ) as role

-- name: examine_settings
select name, setting, reset_val from pg_settings
 where name in ('autovacuum', 'client_connection_check_interval', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
       'lock_timeout', 'max_connections', 'max_locks_per_transaction', 'max_prepared_transactions', 'reserved_connections',
       'statement_timeout', 'superuser_reserved_connections', 'synchronous_commit', 'synchronous_standby_names',
       'tcp_keepalives_count', 'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_user_timeout', 'transaction_timeout')

-- name: examine_clock
select extract(epoch from clock_timestamp())::double precision as now

-- name: examine_locks
-- Without fast-path and predicate locks, which are not in the shared lock table.
select count(*) as used from pg_locks where not fastpath and mode <> 'SIReadLock'

-- name: examine_connections
select (select sum(numbackends) from pg_stat_database)::int as used, s.numbackends as database_used,
       case when r.rolsuper then -1 else d.datconnlimit end as database_limit,
       (select count(*) from pg_stat_activity a where a.usesysid = r.oid) as role_used,
       case when r.rolsuper then -1 else r.rolconnlimit end as role_limit
  from pg_database d join pg_stat_database s on s.datid = d.oid join pg_roles r on r.rolname = session_user
 where d.datname = current_database()

-- name: examine_replicas
-- A role that may not see the details can still count the rows.
select count(*) as connected, count(*) filter (where sync_state in ('sync', 'quorum')) as synchronous from pg_stat_replication

-- name: examine_snapshots
-- What keeps vacuum from removing dead rows of this database. Of another role's session only the pid is visible.
select 'session ' || pid || coalesce(' (' || usename || coalesce(', ' || nullif(application_name, ''), '') || ')', '') as who,
       extract(epoch from clock_timestamp() - xact_start)::double precision as seconds,
       greatest(age(backend_xmin), age(backend_xid)) as transactions
  from pg_stat_activity
 where coalesce(backend_xmin, backend_xid) is not null and pid <> pg_backend_pid() and backend_type <> 'autovacuum worker'
   and (datname = current_database() or backend_type = 'walsender')
union all
select 'prepared transaction ' || quote_literal(gid), extract(epoch from clock_timestamp() - prepared)::double precision, age(transaction)
  from pg_prepared_xacts where database = current_database()
union all
select 'replication slot ' || quote_literal(slot_name), null, age(xmin) from pg_replication_slots where xmin is not null

-- name: examine_transactions
-- Open transactions that protect a lease or have acquired one. Of another role's session the age is not visible.
select 'session ' || a.pid || coalesce(' (' || a.usename || coalesce(', ' || nullif(a.application_name, ''), '') || ')', '') as who, a.pid,
       n.name as what, extract(epoch from clock_timestamp() - a.xact_start)::double precision as seconds
  from pg_locks l join pg_stat_activity a on a.pid = l.pid
       cross join lateral holdfast.lock_label(l.classid, l.objid, l.objsubid) n
 where l.locktype = 'advisory' and l.granted and l.database = (select oid from pg_database where datname = current_database())
   and (n.name like 'transaction under %' or n.name like 'acquire of %')

-- name: examine_functions
select p.proname::text as name, bool_and(has_function_privilege(p.oid, 'execute')) as may from pg_proc p
 where p.pronamespace = to_regnamespace(:schema)::oid and p.proname = any (string_to_array(:names, ' ')) group by 1

-- name: examine_gateways
-- The roles that may do what a gateway may, without superusers and those that own the functions.
select r.rolname::text as role from pg_roles r cross join pg_proc p
 where p.pronamespace = to_regnamespace(:schema)::oid and p.proname = 'peer_announce' and r.rolcanlogin and not r.rolsuper
   and has_function_privilege(r.oid, p.oid, 'execute') and not pg_has_role(r.oid, p.proowner, 'usage')
 order by 1

-- name: examine_holders
select name, kind, role, host, pid from holdfast.lease_list()

-- name: examine_tables
select c.relname::text as name, pg_relation_size(c.oid) as bytes, coalesce(s.n_live_tup, 0) as live, coalesce(s.n_dead_tup, 0) as dead,
       extract(epoch from s.last_autovacuum)::double precision as vacuumed,
       (select string_agg(t.pubname, ', ' order by t.pubname) from pg_publication_tables t
         where t.schemaname = :schema and t.tablename = c.relname) as publications,
       c.relreplident in ('f', 'i')
       or c.relreplident = 'd' and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
       or not exists (select from pg_publication_tables t join pg_publication p on p.pubname = t.pubname
                       where t.schemaname = :schema and t.tablename = c.relname and (p.pubupdate or p.pubdelete)) as identified
  from pg_class c left join pg_stat_all_tables s on s.relid = c.oid
 where c.relnamespace = to_regnamespace(:schema)::oid and c.relkind = 'r' order by c.relname

-- name: examine_fences
select name, seconds from holdfast.fence_ahead()
