delete from holdfast.schema_version where version = 3;
drop function holdfast.lock_end_session(integer, bigint);
drop function holdfast.audit_stands(bigint, text);
drop function holdfast.lock_label(oid, oid, smallint);
drop function holdfast.audit_end(bigint, text);
drop function holdfast.audit_begin(text, text, text, text, jsonb);
drop function holdfast.audit_act(text, text, text, text, bigint, jsonb, text);
drop function holdfast.audit_check(text, text);
drop table holdfast.audit;
