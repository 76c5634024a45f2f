-- name: audit_note
select holdfast.audit_note(:entry::bigint, :fence::bigint, :detail::jsonb) as done

-- name: audit_list
select id, at, actor, role, action, subject, reason, fence, detail, outcome, ended_at from holdfast.audit_list(:limit::int, :action, :actor, :max_bytes::bigint)

-- name: audit_begin
select holdfast.audit_begin(:action, :subject, :actor, :reason, :detail::jsonb) as entry

-- name: audit_end
select holdfast.audit_end(:entry::bigint, :outcome) as done

-- name: policy_list
select version, applied_at, actor, role, reason, datasets from holdfast.policy_list(:version::bigint, :limit::int)

-- name: policy_apply
select holdfast.policy_apply(:datasets::jsonb, :actor, :reason, :expected::bigint) as version
