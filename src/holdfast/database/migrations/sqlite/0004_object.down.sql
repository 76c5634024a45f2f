drop view holdfast_object_next;
drop table holdfast_object_change;
drop table holdfast_object;
drop table holdfast_object_version;
delete from holdfast_schema_version where version = 4;
