delete from holdfast.schema_version where version = 2;
drop function holdfast.lock_remember(jsonb);
drop function holdfast.lock_namespace(text);
drop function holdfast.lock_key(text);
drop table holdfast.lock_name;
drop table holdfast.lock_namespace;
