delete from holdfast_schema_version where version = 2;
drop table holdfast_lock_hold;
drop table holdfast_lock_name;
drop table holdfast_lock_namespace;
