delete from holdfast.schema_version where version = 2;
drop function holdfast.lock_holds();
drop function holdfast.lock_note(boolean, jsonb, jsonb, jsonb);
drop function holdfast.lock_namespace(text);
drop function holdfast.lock_key(text);
drop table holdfast.lock_hold;
drop table holdfast.lock_name;
drop table holdfast.lock_namespace;
