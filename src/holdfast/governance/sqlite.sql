-- name: audit_list
select id, at, actor, null as role, action, subject, reason, fence, detail, outcome, ended_at
  from (
    select *, row_number() over steps as place, sum(bytes) over steps as bytes_so_far
      from (
        select *, length(cast(actor || action || subject || reason || coalesce(detail, '') || coalesce(outcome, '') as blob)) as bytes
          from holdfast_audit
         where (:action is null or action = :action) and (:actor is null or actor = :actor) order by id desc limit :limit)
    window steps as (order by id desc))
 where :max_bytes is null or place = 1 or bytes_so_far <= :max_bytes
 order by id desc;

-- name: audit_begin.insert
insert into holdfast_audit (at, actor, action, subject, reason, detail) values ({now}, :actor, :action, :subject, :reason, :detail);

-- name: audit_begin.entry
select last_insert_rowid() as entry;

-- name: audit.open_entry
select 1 from holdfast_audit where id = :entry and outcome is null;

-- name: audit_note.update
update holdfast_audit set fence = coalesce(:fence, fence), detail = coalesce(:detail, detail) where id = :entry;

-- name: audit_end.update
update holdfast_audit set outcome = :outcome, ended_at = {now} where id = :entry;

-- name: policy_list
select version, applied_at, actor, null as role, reason, datasets from holdfast_policy
 where :version is null or version = :version order by version desc limit :limit;

-- name: policy_apply.changed
select null as version where :expected <> (select coalesce(max(version), 0) from holdfast_policy);

-- name: policy_apply.insert
insert into holdfast_policy (applied_at, actor, reason, datasets) values ({now}, :actor, :reason, :datasets);

-- name: policy_apply.audit
insert into holdfast_audit (at, actor, action, subject, reason, outcome, ended_at)
values ({now}, :actor, 'policy_apply', 'version ' || (select max(version) from holdfast_policy), :reason, 'done', {now});

-- name: policy_apply.version
select max(version) as version from holdfast_policy;
