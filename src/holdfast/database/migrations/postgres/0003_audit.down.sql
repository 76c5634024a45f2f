delete from holdfast.schema_version where version = 3;
drop function holdfast.lock_end_session(integer);
drop function holdfast.lock_label(oid, oid, smallint);
drop function holdfast.audit_end(bigint, text);
drop function holdfast.audit_begin(text, text, text, text, jsonb);
drop table holdfast.audit;
