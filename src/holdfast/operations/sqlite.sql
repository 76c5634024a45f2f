-- name: operation_get
select status, fingerprint, result, result_hash, error, attempt, fence, wal_pointer as pointer, rollback, effect_started, failures, alive,
       coalesce(expires_at <= {now}, 0) as expired, {now} as now, (select max(version) from holdfast_policy) as policy,
       case when status is not null then origin end as origin
  from (select 1) left join holdfast_operation on idem_key = :key;

-- name: operation_look.gone
-- The kernel unlocks the key of a process when it ends, and not before: it need not be looked at twice.
select distinct beat from holdfast_live where coalesce(holdfast_gone(session_key), 0)
   and (:key is null or name in (:lease, :dataset) or name = (select owner from holdfast_idempotency_log where idem_key = :key and status = 'partial'));

-- name: operation_look.declare_dead
update holdfast_beat set dead = 1 where id = :beat;

-- name: operation_begin.lock
-- Changes nothing, and makes this transaction the one that writes.
update holdfast_idempotency_log set attempt = attempt where 0;

-- name: operation_begin.state
select json_object('state', case when exists (select 1 from holdfast_live where name = :lease) then 'busy' else 'free' end, 'began', null, 'fixed', 1,
       'policy', (select max(version) from holdfast_policy), 'now', {now}, 'known', case when status is not null then json_object(
       'status', status, 'fingerprint', fingerprint, 'result', result, 'result_hash', result_hash, 'error', error, 'attempt', attempt, 'fence', fence,
       'pointer', wal_pointer, 'rollback', rollback, 'effect_started', effect_started, 'failures', failures, 'alive', alive,
       'expired', coalesce(expires_at <= {now}, 0), 'origin', '' || origin) end) as answer
  from (select 1) left join holdfast_operation on idem_key = :key;

-- name: operation_claim.known
-- ours: the claim of a repeated request whose first reply was lost.
select {now} as now, wal_pointer as pointer, case when status is not null then json_object(
       'status', status, 'fingerprint', fingerprint, 'result', result, 'result_hash', result_hash, 'error', error, 'attempt', attempt, 'fence', fence,
       'pointer', wal_pointer, 'rollback', rollback, 'effect_started', effect_started, 'failures', failures, 'alive', alive,
       'expired', coalesce(expires_at <= {now}, 0), 'origin', '' || origin) end as known,
       status = 'partial' and exists (select 1 from holdfast_lease l where l.name = :name and l.token = :token and l.fence = o.fence) as ours
  from (select 1) left join holdfast_operation o on idem_key = :key;

-- name: operation.lease
select 1 from holdfast_live where name = :owner and token = :token;

-- name: operation_write.changed
select 'changed' as state where :expected is not (select wal_pointer from holdfast_idempotency_log where idem_key = :key);

-- name: operation.origin
select label, origin from holdfast_operation where idem_key = :key
   and origin is not json_array(:pipeline, :task, :dataset, :operation, :checksum, :params_hash);

-- name: operation_write.log
insert into holdfast_idempotency_log values (:key, :pipeline, :task, :dataset, :operation, :status, :result_hash, {now}, {now}, :checksum, :params_hash, :pointer,
       :fingerprint, :result, :attempt, :fence, :error, {now} + :keep, :label, :owner, :rollback, :effect_started, :failures,
       :entries, (select next from holdfast_place))
    on conflict (idem_key) do update set status = excluded.status, result_hash = excluded.result_hash, updated_at = excluded.updated_at,
       wal_pointer = excluded.wal_pointer, fingerprint = excluded.fingerprint, result = excluded.result, attempt = excluded.attempt, fence = excluded.fence,
       error = excluded.error, expires_at = excluded.expires_at, owner = excluded.owner, rollback = excluded.rollback, effect_started = excluded.effect_started, failures = excluded.failures;

-- name: operation.entries
insert into holdfast_wal_more values ((select next from holdfast_place), :key, :number, {now}, :entries);

-- name: operation_write.outbox
insert into holdfast_outbox (idem_key, attempt, topic, payload, created_at)
select :key, :attempt, json_extract(value, '$[0]'), json_extract(value, '$[1]'), {now} from json_each(:outbox);

-- name: operation.policy
select version, datasets from holdfast_policy order by version desc limit 1;

-- name: operation.row
select idem_key as key, pipeline_id as pipeline, task_id as task, dataset_id as dataset, operation_type as operation, raw_checksum as checksum,
       params_hash, owner from holdfast_idempotency_log where idem_key = :key;

-- name: operation.dataset_is_locked
select exists (select 1 from holdfast_live where name = :lease) as locked;

-- name: operation.use_approval
update holdfast_review set attempt = :attempt
 where id = :id and idem_key = :key and outcome = 'approved' and spent_at is not null and coalesce(attempt, :attempt) = :attempt
   and asked_by is :actor and fingerprint is (select fingerprint from holdfast_idempotency_log where idem_key = :key) returning actor;

-- name: operation_claim_many.log
insert into holdfast_idempotency_log
select value ->> 0, value ->> 5, value ->> 6, value ->> 7, value ->> 8, 'partial', null, {now}, {now}, value ->> 9, value ->> 10, value ->> 1, value ->> 4, null, 1,
       :fence, null, null, value ->> 3, :owner, :rollback, 1, 0, value ->> 2, (select next from holdfast_place) + key
  from json_each(:rows) where true on conflict do nothing;

-- name: operation_claim_many.others
select null as state, g.idem_key as key, g.status, g.fingerprint, g.result, g.result_hash, g.error, g.attempt, g.fence, g.wal_pointer as pointer,
       g.rollback, g.effect_started, g.failures, g.alive, coalesce(g.expires_at <= {now}, 0) as expired, g.origin, {now} as now
  from json_each(:rows) join holdfast_operation g on g.idem_key = value ->> 0 and g.wal_pointer <> value ->> 1;

-- name: operation_finish_many.outbox
insert into holdfast_outbox (idem_key, attempt, topic, payload, created_at)
select g.idem_key, g.attempt, json_extract(o.value, '$[0]'), json_extract(o.value, '$[1]'), {now}
  from json_each(:rows) e join holdfast_idempotency_log g on g.idem_key = e.value ->> 0 and g.wal_pointer = e.value ->> 1
  join json_each(coalesce(e.value ->> 11, '[]')) o;

-- name: operation_finish_many.log
update holdfast_idempotency_log set status = value ->> 5, result = value ->> 6, result_hash = value ->> 7, error = value ->> 8, updated_at = {now},
       wal_pointer = value ->> 2, failures = value ->> 9, effect_started = value ->> 10,
       expires_at = case value ->> 5 when 'success' then {now} + :keep end
  from json_each(:rows) where idem_key = value ->> 0 and wal_pointer = value ->> 1;

-- name: operation_finish_many.entries
insert into holdfast_wal_more
select (select next from holdfast_place) + key, g.idem_key, value ->> 3, {now}, value ->> 4 from json_each(:rows) join holdfast_idempotency_log g on g.idem_key = value ->> 0 and g.wal_pointer = value ->> 2
 where true on conflict do nothing;

-- name: operation_finish_many.changed
select value ->> 0 as key, null as state from json_each(:rows)
 where not exists (select 1 from holdfast_idempotency_log g where g.idem_key = value ->> 0 and g.wal_pointer = value ->> 2);

-- name: operation_list
-- Of those that were touched in the same millisecond, the one that was begun last.
select idem_key as key, label, status, alive, attempt, fence, pipeline_id as pipeline, task_id as task, dataset_id as dataset, operation_type as operation,
       result_hash, error, wal_pointer as pointer, rollback, owner, effect_started, failures, created_at, updated_at, expires_at
  from (
    select *, row_number() over steps as step, sum(bytes) over steps as bytes_so_far
      from (
        select *, length(cast(label || coalesce(pipeline_id, '') || coalesce(task_id, '') || coalesce(dataset_id, '') || coalesce(operation_type, '')
               || coalesce(result_hash, '') || coalesce(error, '') || wal_pointer || coalesce(rollback, '') as blob)) as bytes
          from holdfast_operation
         where (:status is null or status = :status) and (:dataset is null or dataset_id = :dataset) and (:key is null or idem_key = :key)
         order by updated_at desc, begun desc limit :limit)
    window steps as (order by updated_at desc, begun desc))
 where :max_bytes is null or step = 1 or bytes_so_far <= :max_bytes
 order by step;

-- name: operation_match
-- A range of the primary key: 'g' is above every hexadecimal digit.
select idem_key as key, label, status, alive, attempt, fence, pipeline_id as pipeline, task_id as task, dataset_id as dataset, operation_type as operation,
       result_hash, error, wal_pointer as pointer, rollback, owner, effect_started, failures, created_at, updated_at, expires_at
  from holdfast_operation where idem_key >= :prefix and idem_key < :prefix || 'g' order by idem_key limit :limit;

-- name: operation_entries
select number, entries from holdfast_wal where idem_key = :key and number > coalesce(:after_number, 0) order by number limit :limit;

-- name: operation_kin
select (select label || ' (' || idem_key || ')' from holdfast_idempotency_log
         where dataset_id = :dataset and operation_type = :operation and raw_checksum is :checksum and params_hash = :params_hash
           and idem_key <> :key and status not in ('failure', 'undone') limit 1) as same,
       (select label || ' (' || idem_key || ')' from holdfast_idempotency_log
         where dataset_id = :dataset and operation_type = :operation and params_hash = :params_hash and pipeline_id = :pipeline and task_id = :task
           and raw_checksum is not :checksum and (status = 'partial' or status in ('failure', 'undone') and failures > 0) limit 1) as retry_of;

-- name: review_open.close_done
update holdfast_review set closed_at = {now}, spent_at = {now}, outcome = 'done'
 where id in (select id from holdfast_review_now where idem_key = :key and closed_at is null and status = 'done');

-- name: review_open.id
select id from holdfast_review where idem_key = :key and reason = :reason and closed_at is null;

-- name: review_open.insert
insert into holdfast_review (idem_key, label, dataset_id, operation_type, reason, detail, opened_at, asked_by, fingerprint, outputs, four_eyes)
values (:key, :label, :dataset, :operation, :reason, :detail, {now}, :asked_by, :fingerprint, :outputs, :four_eyes);

-- name: review_take.denied
select id, status as outcome, actor, answer from holdfast_review_now
 where idem_key = :key and spent_at is null and (status = 'rejected' or status = 'open' and reason <> 'attempts')
 order by status <> 'rejected', id limit 1;

-- name: review_take.approved
select id from holdfast_review where idem_key = :key and outcome = 'approved' and spent_at is null
   and fingerprint is :fingerprint and asked_by is :asked_by and outputs is :outputs limit 1;

-- name: review_take.spend
update holdfast_review set spent_at = {now}, taken = :token, pointer = (select wal_pointer from holdfast_idempotency_log where idem_key = :key)
 where id = (select min(id) from holdfast_review where idem_key = :key and outcome = 'approved' and spent_at is null
                and fingerprint is :fingerprint and asked_by is :asked_by and outputs is :outputs)
returning id, outcome, actor, answer;

-- name: review_return
update holdfast_review set spent_at = null
 where id = :id and outcome = 'approved' and taken = :token and attempt is null
   and pointer is (select wal_pointer from holdfast_idempotency_log g where g.idem_key = holdfast_review.idem_key) returning true as returned;

-- name: review_list
select id, idem_key as key, label, dataset_id as dataset, operation_type as operation, reason, detail, opened_at, status, actor,
       answer, closed_at, spent_at, asked_by
  from (
    select *, row_number() over steps as place, sum(bytes) over steps as bytes_so_far
      from (
        select *, length(cast(label || coalesce(dataset_id, '') || coalesce(operation_type, '') || detail || coalesce(actor, '')
               || coalesce(answer, '') || coalesce(asked_by, '') as blob)) as bytes
          from holdfast_review_now
         where (:status is null or status = :status) and (:id is null or id = :id) and (:key is null or idem_key = :key)
         order by id limit :limit)
    window steps as (order by id))
 where :max_bytes is null or place = 1 or bytes_so_far <= :max_bytes
 order by id;

-- name: review_decide.by_asker
select 1 from holdfast_review where id = :id and four_eyes and asked_by = :actor;

-- name: review_decide.update
update holdfast_review set closed_at = {now}, outcome = :outcome, actor = :actor, answer = :answer
 where id = (select id from holdfast_review_now where id = :id and status = 'open');

-- name: review_decide.audit
insert into holdfast_audit (at, actor, action, subject, reason, detail, outcome, ended_at)
select {now}, :actor, 'review_decide', 'review ' || id, :answer, json_object('outcome', outcome, 'operation', label, 'key', idem_key), 'done', {now}
  from holdfast_review where id = :id;

-- name: operation_failed
select coalesce(sum(failures), 0) as failed from holdfast_idempotency_log
 where status <> 'success' and updated_at > {now} - :seconds and status in ('failure', 'undone') and failures > 0 and dataset_id is :dataset;

-- name: wal_chains
with known (key) as (
    select key from (select idem_key as key from holdfast_idempotency_log
                      where idem_key between coalesce(:key, :after, '') and coalesce(:key, 'g') and idem_key is not :after
                        and (:since is null or updated_at >= :since)
                     union
                     select idem_key from holdfast_wal_more
                      where idem_key between coalesce(:key, :after, '') and coalesce(:key, 'g') and idem_key is not :after
                        and (:since is null or at >= :since))
     order by key limit :limit)
select k.key, w.number, w.entries, g.label, g.status, g.attempt, g.wal_pointer as pointer, coalesce(g.alive, 0) as alive, g.result, g.result_hash,
       g.fingerprint, g.effect_started, g.error, g.failures, g.fence, g.owner, g.rollback, g.expires_at - g.updated_at as keep,
       g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from known k left join holdfast_operation g on g.idem_key = k.key left join (
       select idem_key, 1 as number, entries from holdfast_idempotency_log where entries is not null and idem_key in (select key from known)
       union all select idem_key, number, entries from holdfast_wal_more where idem_key in (select key from known)) w on w.idem_key = k.key
 order by k.key, w.number;

-- name: wal_latest
with known (key) as (
    select idem_key from (select idem_key from holdfast_idempotency_log order by updated_at desc limit :limit)
    union select idem_key from (select idem_key from holdfast_wal_more order by place desc limit :limit))
select k.key, w.number, w.entries, g.label, g.status, g.attempt, g.wal_pointer as pointer, coalesce(g.alive, 0) as alive, g.result, g.result_hash,
       g.fingerprint, g.effect_started, g.error, g.failures, g.fence, g.owner, g.rollback, g.expires_at - g.updated_at as keep,
       g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from known k left join holdfast_operation g on g.idem_key = k.key left join (
       select idem_key, 1 as number, entries from holdfast_idempotency_log where entries is not null and idem_key in (select key from known)
       union all select idem_key, number, entries from holdfast_wal_more where idem_key in (select key from known)) w on w.idem_key = k.key
 order by k.key, w.number;

-- name: wal_find
select idem_key as key from holdfast_wal where substr(entries, -67) = '"' || :hash || '"]' or substr(entries, 1, 67) = '["' || :hash || '"' limit 1;

-- name: wal_read
-- There is one writer at a time, so the order of the rows is that of the commits. The first row says whether the cursor has expired.
select 0 as space, :after_place is not null and not exists (select 1 from holdfast_wal where place = :after_place)
       and not exists (select 1 from holdfast_wal_archived where place = :after_place) as expired, 0 as horizon, null as place, null as key, null as entries
union all
select null, 0, 0, place, idem_key, entries from (
    select *, row_number() over steps as number, sum(length(cast(entries as blob))) over steps as bytes_so_far
      from (
        select place, idem_key, entries from holdfast_idempotency_log where entries is not null and place > coalesce(:after_place, 0)
        union all select place, idem_key, entries from holdfast_wal_more where place > coalesce(:after_place, 0)
        order by place limit :limit)
    window steps as (order by place) order by place)
 where :max_bytes is null or number = 1 or bytes_so_far <= :max_bytes;

-- name: wal_archive.done
select 'archived' as state where exists (select 1 from holdfast_idempotency_log where idem_key = :key and wal_pointer = :pointer);

-- name: wal_archive.changed
select 'changed' as state where not exists (
    select 1 from holdfast_idempotency_log where idem_key = :key and wal_pointer = :expected and status <> 'partial');

-- name: wal_archive.unpublished
select 'unpublished' as state where exists (select 1 from holdfast_outbox where idem_key = :key and published_at is null)
    or exists (select 1 from holdfast_relay where place < (select max(place) from holdfast_wal where idem_key = :key))
    or exists (select 1 from holdfast_parked where idem_key = :key);

-- name: wal_archive.pointer
update holdfast_idempotency_log set wal_pointer = :pointer where idem_key = :key;

-- name: wal_archive.places
insert into holdfast_wal_archived select place from holdfast_wal where idem_key = :key and number < :number;

-- name: wal_archive.entries
delete from holdfast_wal_more where idem_key = :key and number < :number;

-- name: wal_archive.first_entries
update holdfast_idempotency_log set entries = null where idem_key = :key;

-- name: wal_archive.outbox
delete from holdfast_outbox where idem_key = :key;

-- name: wal_archive.audit
insert into holdfast_audit (at, actor, action, subject, reason, detail, outcome, ended_at)
select {now}, :actor, 'wal_archive', substr(label, 1, 200), :reason, json_object('key', :key, 'pointer', :expected), 'done', {now}
  from holdfast_idempotency_log where idem_key = :key;

-- name: operation_correct.reviews
update holdfast_review set closed_at = coalesce(closed_at, {now}), spent_at = {now}, actor = coalesce(actor, :actor), answer = coalesce(answer, :reason),
       outcome = coalesce(outcome, case :status when 'success' then 'done' else 'reset' end)
 where idem_key = :key and spent_at is null and :status <> 'undone';

-- name: operation_correct.audit
insert into holdfast_audit (at, actor, action, subject, reason, fence, detail, outcome, ended_at)
values ({now}, :actor, case :status when 'failure' then 'operation_reset' when 'success' then 'operation_complete' else 'operation_rollback' end,
       substr(:label, 1, 200), :reason, :fence, json_object('key', :key, 'reviews', :reviews), 'done', {now});

-- name: operation_expire.results
update holdfast_idempotency_log set result = null where idem_key in (
    select idem_key from holdfast_idempotency_log where result is not null and expires_at <= {now} order by expires_at limit :limit);

-- name: operation_expire.audit
insert into holdfast_audit (at, actor, action, subject, reason, detail, outcome, ended_at)
values ({now}, :actor, 'operation_expire', 'expired results', :reason, json_object('results', :results), 'done', {now});

-- name: operation_health
-- Never reads the whole log: what is unfinished, expired or unpublished has an index, and rows are numbered. An operation that
-- was reset (its error names the actor) is not counted as failed.
select (select coalesce(max(rowid), 0) from holdfast_idempotency_log) as operations, coalesce(sum(status = 'partial'), 0) as partial,
       coalesce(sum(status = 'partial' and not alive), 0) as orphaned,
       coalesce(sum(status = 'partial' and not alive and updated_at < {now} - :stale), 0) as stale_partials,
       {now} - min(case when status = 'partial' and not alive then updated_at end) as oldest, coalesce(sum(status = 'failure' and error not like '%"actor": %'), 0) as failed,
       (select count(*) from (select 1 from holdfast_idempotency_log where updated_at > {now} - 86400 limit 10 * :enough)) as today,
       (select page_count * page_size from pragma_page_count(), pragma_page_size()) as bytes,
       (select count(*) from (select 1 from holdfast_idempotency_log where result is not null and expires_at <= {now} limit :enough)) as expired,
       (select count(*) from holdfast_outbox where published_at is null) as unpublished,
       {now} - (select min(created_at) from holdfast_outbox where published_at is null) as lag,
       (select count(*) from holdfast_review_now where status = 'open') as reviews, {now} as now,
       exists (select 1 from holdfast_relay) or exists (select 1 from holdfast_audit where action = 'relay_remove') as relayed,
       (select count(*) from (select 1 from holdfast_wal limit :enough)) as unrelayed, {now} - (select at from holdfast_wal order by place limit 1) as unrelayed_for
  from (select status, updated_at, alive, error from holdfast_operation where status <> 'success' order by updated_at limit :enough);

-- name: operation_activity
with origin as (select (cast({now} / :step as integer) + 1 - :buckets) * :step as start),
latest as (
    select updated_at, status, start from holdfast_idempotency_log, origin where updated_at >= start order by updated_at desc limit :max_rows)
select null as bucket, 'start' as kind, start as value from origin
union all select null, 'complete', min(updated_at) from latest having count(*) >= :max_rows
union all select cast((updated_at - start) / :step as integer), status, cast(count(*) as real) from latest group by 1, 2;

-- name: operation_indexes
-- Those of its keys are part of a table here, and the log is in the order of its rows: neither can be taken away.
select substr(name, length('holdfast_') + 1) as name from sqlite_master
 where type = 'index' and tbl_name in ('holdfast_idempotency_log', 'holdfast_wal_more', 'holdfast_outbox', 'holdfast_review')
union all select column1 from (values ('idempotency_log_pkey'), ('wal_more_pkey'), ('wal_more_order'));
